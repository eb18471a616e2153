"""Everyday use of eager tensors: operators, indexing, reductions, creation, conversions.

Programs run lazily, so the answers are dtypes and shapes, and nothing is compiled: `eager_values` has elements.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from max.driver import CPU
from max.dtype import DType
from max.experimental import functional as F
from max.experimental import random
from max.experimental.tensor import Tensor
from max.graph import DeviceRef, Dim, Shape, TensorType
from tests.differential.families._plain import listed
from tests.differential.program import Family, dims_text, dtype_name, evaluate

DTYPES = {
    "b": DType.bool,
    "i8": DType.int8,
    "i16": DType.int16,
    "i32": DType.int32,
    "i64": DType.int64,
    "u8": DType.uint8,
    "u32": DType.uint32,
    "u64": DType.uint64,
    "f16": DType.float16,
    "bf16": DType.bfloat16,
    "f32": DType.float32,
    "f64": DType.float64,
}


def t(dtype: str, *shape: int) -> Tensor:
    """A tensor of ones."""
    return Tensor.ones(shape, dtype=DTYPES[dtype], device=CPU())


def namespace() -> Mapping[str, Any]:
    return {
        "t": t,
        "x": t("f32", 2, 3, 4),
        "i": t("i32", 3),
        "u": t("u8", 3),
        "b": t("b", 3),
        "np": np,
        "T": Tensor,
        "F": F,
        "random": random,
        "CPU": CPU,
        "DType": DType,
        "D": DTYPES,
        "Dim": Dim,
        "Shape": Shape,
        "TensorType": TensorType,
        "DeviceRef": DeviceRef,
    }


def lazily() -> contextlib.AbstractContextManager[Any]:
    """Where operations wait for a value; they always do in 25.7."""
    return F.lazy() if hasattr(F, "lazy") else contextlib.nullcontext()


def run(line: str) -> Any:
    with lazily():
        value = evaluate(line, namespace())
        # what 25.7 finds out when it is asked is an answer
        describe(value)
        return value


def describe(value: Any) -> str | None:
    if isinstance(value, Tensor):
        return f"tensor {dtype_name(value.dtype)}{dims_text(value.shape)}"
    return None


INDEXING = """
x[0]
x[-1]
x[2]
x[-3]
x[0, 1]
x[0, 1, 2]
x[0, 1, 2, 3]
x[...]
x[..., 0]
x[0, ...]
x[..., 0, ...]
x[None]
x[None, 0]
x[:, None]
x[..., None]
x[None, ..., None]
x[:]
x[:1]
x[1:]
x[-1:]
x[:-1]
x[0:0]
x[5:]
x[:9]
x[2:1]
x[::2]
x[:, ::2]
x[:, ::-1]
x[:, :, 3:0:-1]
x[::0]
x[:, 1:3]
x[:, 1:3, ::3]
x[0, :, 1]
x[()]
x[0.0]
x[1.5]
x['a']
x[True]
x[[0, 1]]
x[[0, 1], [0, 1]]
x[(0, 1)]
x[np.int64(1)]
x[np.int32(0), np.uint8(1)]
x[np.array([0, 1])]
x[np.array([True, False])]
x[x > 0]
x[t('i64')]
x[t('i64', 2)]
x[t('i32', 1)]
x[slice(0, 2)]
x[slice(None)]
x[[slice(0, 1), slice(1, 2)]]
x[0:Dim(1)]
x[Dim(1)]
t('f32')[0]
t('f32')[...]
t('f32')[()]
t('f32')[None]
t('f32')[:]
t('f32', 0)[0]
t('f32', 0)[:]
t('f32', 0, 3)[:, 0]
t('f32', 4)[1.0:2]
t('f32', 4)['a':]
t('f32', 4)[None:None:None]
t('f32', 4)[:True]
"""

ASSIGNMENTS = """
x[0] = 1.0; x
x[0] = 1; x
x[0] = True; x
x[0] = t('f32', 3, 4); x
x[0] = t('f32', 4); x
x[0] = t('f32', 5); x
x[0] = t('i32', 3, 4); x
x[0] = t('f64', 3, 4); x
x[0] = np.ones((3, 4), np.float32); x
x[0] = np.ones((3, 4)); x
x[0] = [1.0, 2.0, 3.0, 4.0]; x
x[...] = 2.0; x
x[:] = 0.0; x
x[:, 1] = 3.0; x
x[:, 1:3] = 3.0; x
x[:, ::2] = 3.0; x
x[:, ::-1] = 3.0; x
x[0, 1, 2] = 5.0; x
x[0, 1, 2, 3] = 5.0; x
x[9] = 5.0; x
x[-1] = 5.0; x
x[None] = 5.0; x
x[x > 0] = 5.0; x
x[[0, 1]] = 5.0; x
x['a'] = 5.0; x
x[0] = 'a'; x
x[0] = None; x
x += 1; x
x -= 1.5; x
x *= t('f32', 4); x
x /= 2; x
x //= 2; x
x **= 2; x
x %= 2; x
x @= t('f32', 4, 4); x
x += t('f64', 4); x
x += t('i32', 4); x
x += t('f32', 5); x
x += np.ones(4, np.float32); x
x += [1.0, 2.0, 3.0, 4.0]; x
x &= True; x
x <<= 1; x
del x[0]
x.shape = (24,)
x.dtype = D['f64']
x.foo = 1
"""

OPERATORS = """
x + 1
1 + x
x + 1.5
x + True
x + None
x + 'a'
x + [1.0, 2.0, 3.0, 4.0]
x + (1.0, 2.0, 3.0, 4.0)
x + np.float64(1.5)
x + np.float32(1.5)
x + np.int64(1)
x + np.ones(4, np.float32)
x + np.ones(4)
x + np.ones(4, np.int32)
np.float32(1) + x
np.float64(1) * x
x + 1j
x + 10**400
x + 1e300
x + float('nan')
x - 1
1 - x
x * 2
2 * x
x / 2
2 / x
x // 2
2 // x
x % 2
2 % x
x ** 2
2 ** x
x ** 0.5
x ** -1
x ** t('f32', 4)
x ** t('i32', 4)
divmod(x, 2)
pow(x, 2)
pow(x, 2, 3)
-x
+x
~x
abs(x)
round(x)
round(x, 1)
x << 1
x >> 1
x & x
x | x
x ^ x
x == x
x == 1
x == None
x == 'a'
x != x
x != None
x < x
x < 1
x <= 1.5
x > None
x >= t('f32', 4)
1 < x
x == np.ones(4, np.float32)
x < [1.0, 2.0, 3.0, 4.0]
x is x
x in [x]
x + t('f32', 3, 1)
x + t('f32', 3)
x + t('f32', 2, 1, 1)
x + t('f32', 5, 2, 3, 4)
x + t('f32', 2, 3)
x + t('f32')
x + t('f32', 0)
x + t('f32', 1)
x @ t('f32', 4, 5)
x @ t('f32', 4)
x @ t('f32', 3)
x @ t('f32', 5, 5)
x @ t('f32', 2, 4, 5)
x @ t('f32', 1, 4, 5)
x @ t('f32', 7, 1, 4, 5)
x @ t('f32')
x @ 2
x @ t('f64', 4, 5)
x @ t('i32', 4, 5)
x @ np.ones((4, 5), np.float32)
np.ones((2, 3, 3), np.float32) @ x
t('f32', 4) @ t('f32', 4)
t('f32', 4) @ t('f32', 4, 5)
t('f32', 4) @ t('f32', 2, 4, 5)
t('i32', 2, 3) @ t('i32', 3, 2)
t('b', 2, 3) @ t('b', 3, 2)
x.T @ x
F.matmul(x, t('f32', 4, 5))
"""

INTEGERS = """
i + 1
i + 1.5
i + 1.0
i + True
i + 300
i + 2**40
i - 2**31
i * 2.0
i / 2
i / i
i // 2
i // 0
i // 2.0
i % 2
i % 0
i % 2.5
i ** 2
i ** -1
i ** 0.5
i ** i
2 ** i
2.5 ** i
i << 1
i >> 1
i & 1
i | i
i ^ i
~i
-i
abs(i)
i < 2.5
i == 2.0
i == 2.5
i == 10**30
i @ i
i + np.int8(3)
i + np.float32(3)
i + np.array([1, 2, 3])
i + np.array([1.0, 2.0, 3.0])
u + 1
u - 1
u + -1
u + 256
u + 1.5
-u
~u
u == -1
u < 256
u < -1
b + b
b + 1
b - b
b * b
b / b
b & b
b | True
b ^ b
~b
-b
abs(b)
b == b
b == True
b == 1
b < b
b ** 2
b // b
b % b
b & i
i & b
b + i
b * 1.5
"""

MEMBERS = """
x.shape
x.rank
x.dtype
x.device
x.type
x.ndim
x.size
x.num_elements()
len(x)
len(t('f32'))
len(t('f32', 0))
x.shape[0]
x.shape == (2, 3, 4)
x.shape == [2, 3, 4]
list(x.shape)
tuple(x.shape)
int(x.shape[1])
x.shape[0] * 2
x.T
t('f32', 4).T
t('f32').T
x.real
x.mT
x.H
x.foo
x.item
x.tolist()
x.numpy()
x.cast(D['i32'])
x.cast('int32')
x.cast(None)
x.cast(np.int32)
x.cast(int)
x.cast()
x.to(CPU())
x.to(device=CPU())
x.to(D['f64'])
x.to('cpu')
x.to(None)
x.to(DeviceRef.CPU())
x.astype(D['i32'])
x.reshape((6, 4))
x.reshape([6, 4])
x.reshape(6, 4)
x.reshape((-1,))
x.reshape(-1)
x.reshape((-1, 4))
x.reshape((-1, -1))
x.reshape((5, 5))
x.reshape((6, -1, 4))
x.reshape((0, -1))
x.reshape(())
x.reshape((Dim(6), Dim(4)))
x.reshape(('a', 4))
x.reshape((6.0, 4))
t('f32', 1).reshape(())
t('f32').reshape((1, 1))
t('f32', 0).reshape((0, 3))
t('f32', 0).reshape((-1,))
x.permute([2, 0, 1])
x.permute((2, 0, 1))
x.permute([0, 1])
x.permute([0, 0, 1])
x.permute([0, 1, -1])
x.permute(2, 0, 1)
x.transpose(0, 1)
x.transpose(-1, -2)
x.transpose(0, 3)
x.transpose()
x.transpose(0, 0)
x.squeeze(0)
x.squeeze()
x[0:1].squeeze(0)
x[0:1].squeeze(-3)
x.squeeze(5)
x.unsqueeze(0)
x.unsqueeze(-1)
x.unsqueeze(3)
x.unsqueeze(4)
x.unsqueeze()
x.broadcast_to((5, 2, 3, 4))
x.broadcast_to((3, 4))
x.broadcast_to((2, 3, 5))
x.broadcast_to(4)
t('f32', 1, 4).broadcast_to([3, 4])
x.split([1, 2], axis=1)
x.split([1, 1], axis=1)
x.split([1, 2], axis=5)
x.split(2, axis=1)
x.split(3, axis=-1)
x.split([1, 1])
x.split(0)
x.max()
x.max(0)
x.max(axis=1)
x.max(None)
x.max(5)
x.max((0, 1))
x.max(axis=0, keepdims=True)
x.max(t('f32', 4))
x.min()
x.min(axis=-2)
x.mean()
x.mean(0)
x.mean(axis=None)
x.sum()
x.sum(1)
x.sum(axis=None)
x.sum(keepdims=False)
x.prod()
x.prod(axis=0)
x.argmax()
x.argmax(axis=0)
x.argmax(axis=None)
x.argmin()
x.std()
x.var()
x.any()
x.all()
x.exp()
x.sqrt()
x.abs()
x.clip(min=0.0)
x.clip(min=0.0, max=1.0)
x.clip(max=1)
x.clip()
x.clip(0.0, 1.0)
x.flatten()
x.gather(0)
x.rebind((2, 3, 4))
x.rebind((2, 3, 5))
hash(x) == hash(x)
{x: 1}[x]
callable(x.realize)
isinstance(x, T)
T.zeros
x.driver_tensor
x.storage
"""

CREATION = """
T([[1.0, 2.0]])
T([1, 2, 3])
T([True, False])
T([1, 2.5])
T([[1.0], [2.0, 3.0]])
T([])
T([[], []])
T(3)
T(3.5)
T(True)
T('a')
T(None)
T()
T((1, 2))
T(range(3))
T(np.ones((2, 3)))
T(np.ones((2, 3), np.float32))
T(np.ones((2, 3), np.int64))
T(np.ones(3, np.int8), dtype=D['f32'])
T(np.float32(3))
T(np.array(3.0))
T([1, 2], dtype=D['i32'])
T([1.5, 2], dtype=D['i32'])
T([300], dtype=D['u8'])
T([-1], dtype=D['u8'])
T([1e300], dtype=D['f32'])
T([1, 0], dtype=D['b'])
T([1.0], dtype=D['bf16'])
T([1.0], dtype=D['f16'], device=CPU())
T([1.0], dtype='float32')
T([1.0], device='cpu')
T([1.0], D['f64'])
T(x)
T([x, x])
T([t('f32'), t('f32')])
T.ones((2, 3))
T.ones([2, 3])
T.ones(3)
T.ones(())
T.ones((0,))
T.ones((-1,))
T.ones(('a',))
T.ones((2.0,))
T.ones((2, 3), dtype=D['i32'])
T.ones((2, 3), dtype=D['b'])
T.zeros((2, 3))
T.zeros(Shape((2, 3)))
T.zeros(x.shape)
T.full((2, 3), 7)
T.full((2, 3), 7.5)
T.full((2, 3), 7.5, dtype=D['i32'])
T.full((2, 3), 300, dtype=D['u8'])
T.full((2, 3), True, dtype=D['b'])
T.full((2, 3), t('f32'))
T.full((2, 3), None)
T.full((2, 3))
T.zeros_like(x)
T.ones_like(x)
T.full_like(x, 3)
T.full_like(x, 3.5)
T.full_like(t('i32', 3), 3.5)
T.zeros_like(x.type)
T.zeros_like(TensorType(D['i32'], (2, 3), DeviceRef.CPU()))
T.zeros_like(np.ones(3))
T.zeros_like((2, 3))
T.range_like(x)
T.range_like(x.type)
T.range_like(t('i32', 4))
T.arange(5)
T.arange(2, 5)
T.arange(0, 10, 2)
T.arange(5, 0, -1)
T.arange(5, 0)
T.arange(0)
T.arange(0.0, 1.0, 0.25)
T.arange(0, 1, 0.25)
T.arange(0, 1, 0.3)
T.arange(5, dtype=D['i32'])
T.arange(5, dtype=D['f64'])
T.arange(5, step=2)
T.arange(0, 5, 0)
T.arange(stop=5)
T.arange()
T.arange(5, out_dim=5)
T.from_dlpack(np.ones((2, 3)))
T.from_dlpack(np.ones((2, 3), np.int32))
T.from_dlpack(np.ones(3, np.float16))
T.from_dlpack(np.ones(3, bool))
T.from_dlpack(np.float32(3))
T.from_dlpack(np.array(3.0))
T.from_dlpack(np.ones((2, 3)).T)
T.from_dlpack(np.ones((4, 3))[::2])
T.from_dlpack(np.ones((0, 3)))
T.from_dlpack([1.0])
T.from_dlpack(3)
T.from_dlpack(np.ones(2, np.complex64))
T.constant([1.0, 2.0])
T.constant(3)
F.constant([1.0, 2.0])
F.constant(3)
F.constant(3, D['i32'])
F.constant(3, D['i32'], CPU())
F.constant(np.ones(3))
F.ones((2, 3))
F.zeros([2])
F.full((2,), 3)
F.arange(5)
F.range(0, 5, 1)
F.range(0, 5)
F.range(5)
F.range(0, 5, 1, dtype=D['i32'])
F.range(0, 5, 2)
F.range(0.0, 1.0, 0.5)
F.hann_window(5)
random.uniform((2, 3))
random.uniform([2, 3], (0, 2))
random.uniform(3)
random.uniform((2, 3), range=(0, 5))
random.uniform((2, 3), dtype=D['f64'])
random.uniform((2, 3), dtype=D['i32'])
random.uniform((2, 3), (1, 0))
random.uniform()
random.gaussian((2, 3))
random.normal((2, 3), 1.0, 2.0)
random.normal((2, 3), mean=1.0, std=2.0)
random.gaussian((2, 3), std=-1.0)
random.gaussian((2, 3), dtype=D['bf16'])
random.set_seed(3)
random.set_seed(-1)
random.set_seed('a')
random.set_seed(1.5)
random.seed()
random.uniform_like(x)
random.gaussian_like(x.type)
"""

FUNCTIONS = """
F.max(x)
F.max(x, axis=0)
F.max(x, axis=None)
F.max(x, t('f32', 4))
F.max(x, 0.5)
F.min(x, 0.5)
F.min(x)
F.min(x, axis=0)
F.sum(x)
F.sum(x, axis=None)
F.sum(x, 1)
F.sum(t('i32', 3))
F.sum(t('b', 3))
F.sum(t('bf16', 3))
F.mean(x, axis=(0, 1))
F.mean(t('i32', 3))
F.mean(t('b', 3))
F.prod(x)
F.prod(t('i32', 3), axis=None)
F.argmax(x)
F.argmin(x, axis=0)
F.argmax(x, axis=None)
F.argmax(t('b', 3))
F.argmax(t('f32'))
F.argsort(t('f32', 5))
F.argsort(t('f32', 5), ascending=False)
F.argsort(x)
F.top_k(x, 2)
F.top_k(x, 2, axis=0)
F.top_k(x, 9)
F.top_k(x, 0)
F.bottom_k(x, 2)
F.cumsum(x)
F.cumsum(x, axis=1)
F.cumsum(x, axis=0, exclusive=True, reverse=True)
F.softmax(x)
F.softmax(x, axis=0)
F.softmax(t('i32', 3))
F.softmax(x, axis=7)
F.logsoftmax(x)
F.exp(x)
F.exp(t('i32', 3))
F.exp(t('f16', 3))
F.exp(t('bf16', 3))
F.exp(t('b', 3))
F.exp(2.0)
F.exp([1.0, 2.0])
F.exp(np.ones(3, np.float32))
F.sqrt(t('i32', 3))
F.rsqrt(x)
F.log(t('u8', 3))
F.log1p(x)
F.sin(x)
F.cos(x)
F.tanh(x)
F.atanh(x)
F.acos(x)
F.erf(x)
F.gelu(x)
F.gelu(x, approximate='tanh')
F.gelu(x, 'none')
F.gelu(x, 'foo')
F.gelu(t('i32', 3))
F.silu(x)
F.relu(x)
F.relu(t('i32', 3))
F.sigmoid(x)
F.abs(x)
F.abs(t('u8', 3))
F.abs(t('b', 3))
F.negate(x)
F.floor(x)
F.floor(t('i32', 3))
F.ceil(x)
F.round(x)
F.trunc(x)
F.is_nan(x)
F.is_inf(x)
F.is_nan(t('i32', 3))
F.logical_not(t('b', 3))
F.logical_not(x)
F.logical_and(t('b', 3), t('b', 3))
F.logical_and(x, x)
F.add(x, 1)
F.add(1, 2)
F.add(x, np.ones(4, np.float32))
F.sub(x, t('f32', 4))
F.div(t('i32', 3), 2)
F.div(x, t('f32', 5))
F.mod(t('i32', 3), 2)
F.floor_div(x, 2)
F.pow(x, 2)
F.pow(x, t('i32', 4))
F.pow(t('i32', 3), 2)
F.equal(x, 1)
F.not_equal(x, x)
F.greater(x, 1)
F.greater_equal(x, t('f32', 4))
F.where(x > 0, x, x)
F.where(x > 0, x, 0.0)
F.where(x > 0, 1.0, 0.0)
F.where(x > 0, x, t('f32', 4))
F.where(x, x, x)
F.where(x > 0, x, t('i32', 4))
F.where(True, x, x)
F.concat([x, x])
F.concat([x, x], axis=-1)
F.concat((x, x), 1)
F.concat([x, t('f32', 4)])
F.concat([x, t('f64', 2, 3, 4)])
F.concat([])
F.concat([x])
F.concat(x)
F.concat([x, x], axis=5)
F.concat([x, t('f32', 5, 3, 4)])
F.stack([x, x])
F.stack([x, x], axis=-1)
F.stack([x, x], axis=9)
F.stack([x, t('f32', 4)])
F.stack([])
F.split(x, [1, 2], 1)
F.split(x, [1, 2], axis=1)
F.split(x, 2, axis=2)
F.chunk(x, 2, axis=2)
F.chunk(x, 3, axis=2)
F.chunk(x, 2)
F.tile(x, [1, 2, 1])
F.tile(x, [2])
F.repeat_interleave(x, 2)
F.repeat_interleave(x, 2, axis=1)
F.flatten(x)
F.flatten(x, 1)
F.flatten(x, 1, 2)
F.reshape(x, (6, 4))
F.permute(x, [1, 0, 2])
F.transpose(x, 0, 1)
F.squeeze(x, 0)
F.unsqueeze(x, 0)
F.broadcast_to(x, (5, 2, 3, 4))
F.pad(x, [0, 0, 1, 1, 2, 2])
F.pad(x, [1, 1])
F.pad(x, [0, 0, 1, 1, 2, 2], value=1.0)
F.pad(x, [0, 0, 1, 1, 2, 2], mode='constant', value=1)
F.pad(x, [0, 0, 1, 1, 1, 1], mode='reflect')
F.pad(x, [2, 0, 1, 1, 0, 3], mode='edge')
F.pad(x, [0, 0, 5, 5, 0, 0], mode='reflect')
F.pad(x, [-1, 0, 0, 0, 0, 0], mode='edge')
F.pad(x, [1, 0, 0, 0, 0, 0], mode='wrap')
F.gather(x, t('i64', 2), axis=0)
F.gather(x, t('i32', 2, 2), axis=1)
F.gather(x, t('i64', 2))
F.gather(x, t('i64'), axis=0)
F.gather(x, [0, 1], axis=0)
F.gather(x, 0, axis=0)
F.gather(x, t('f32', 2), axis=0)
F.gather_nd(x, t('i64', 5, 2))
F.scatter(x, t('f32', 1, 3, 4), t('i64', 1, 3, 4), axis=0)
F.scatter(x, t('f32', 1, 3, 4), t('i64', 1, 3, 4))
F.nonzero(t('f32', 3), 'n')
F.outer(t('f32', 3), t('f32', 4))
F.band_part(x, 1, 1)
F.band_part(x, num_lower=None, num_upper=0)
F.band_part(x, -1, 0, exclude=True)
F.cast(x, D['i32'])
F.cast(x, D['f64'])
F.layer_norm(x, t('f32', 4), t('f32', 4), 1e-5)
F.rms_norm(x, t('f32', 4), 1e-5)
F.rms_norm(x, t('f32', 4), epsilon=1e-5)
F.layer_norm(x, gamma=t('f32', 4), beta=t('f32', 4), epsilon=1e-5)
F.conv2d(t('f32', 1, 5, 5, 2), t('f32', 3, 3, 2, 4))
F.conv2d(t('f32', 1, 5, 5, 2), t('f32', 3, 3, 2, 4), stride=(2, 2), padding=(1, 1, 1, 1))
F.conv2d(t('f32', 1, 5, 5, 2), t('f32', 3, 3, 2, 4), stride=2)
F.max_pool2d(t('f32', 1, 6, 6, 2), (2, 2))
F.avg_pool2d(t('f32', 1, 6, 6, 2), kernel_size=(2, 2), stride=2)
F.fold(t('f32', 1, 8, 9), (4, 4), (2, 2))
F.masked_scatter(x, x > 0, t('f32', 24), 'n')
F.transfer_to(x, CPU())
F.transfer_to(x, DeviceRef.CPU())
F.slice_tensor(x, [slice(0, 1)])
F.slice_tensor(x, [0])
F.clip(x, 0.0, 1.0)
F.clamp(x, 0.0, 1.0)
F.elementwise_max(x, 1.0)
F.elementwise_min(x, t('f32', 4))
F.complex_mul(t('f32', 3, 2), t('f32', 3, 2))
F.as_interleaved_complex(x)
F.irfft(t('f32', 3, 2), 4)
F.resize_nearest(t('f32', 1, 2, 3, 3), (1, 2, 6, 6))
F.group_norm(t('f32', 2, 4, 3), t('f32', 4), t('f32', 4), 2, 1e-5)
F.functional(lambda a, b: a + b)(x, x)
F.functional(lambda a: (a, a * 2))(x)
F.functional(lambda a: [a])(x)
F.functional(lambda a: 3)(x)
F.functional(lambda a: None)(x)
"""


def dtypes(seed: int) -> list[str]:
    """Pairs of dtypes under an operator, and each dtype under functions and beside numbers."""
    del seed
    names = list(DTYPES)
    lines = [f"t('{a}', 3) + t('{b}', 3)" for a in names for b in names if a < b]
    lines += [f"t('{a}', 3) / t('{a}', 3)" for a in names]
    lines += [f"t('{a}', 3) {op} {n}" for a in names for op in ("*", "<") for n in ("2", "2.0")]
    lines += [f"F.{f}(t('{a}', 2, 3))" for a in names for f in ("sum", "max", "mean", "cumsum")]
    return lines


def programs(seed: int) -> list[str]:
    parts = (INDEXING, ASSIGNMENTS, OPERATORS, INTEGERS, MEMBERS, CREATION, FUNCTIONS)
    return list(dict.fromkeys([line for part in parts for line in listed(part)] + dtypes(seed)))


FAMILY = Family(programs=programs, run=run, describe=describe)
