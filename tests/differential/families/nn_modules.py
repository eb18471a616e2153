"""`max.nn.Module`: names of weights, state dicts, shared weights, `Sequential` and `LayerList`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from max import driver, nn
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue, Weight, ops
from max.graph.weights import WeightData
from max.nn import Linear, Module, Sequential
from max.nn.layer import recursive_named_layers
from tests.differential.families._plain import plain_family

f32, cpu = DType.float32, DeviceRef.CPU()
Tensor = getattr(driver, "Tensor", None) or driver.Buffer


def arange(*shape: int) -> np.ndarray:
    return np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)


def linear(rows: int = 3, columns: int = 2, **more: Any) -> Linear:
    return Linear(rows, columns, f32, cpu, **more)


class Two(Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = linear()
        self.b = linear(2, 4, has_bias=True)

    def __call__(self, x: TensorValue) -> TensorValue:
        return self.b(self.a(x))


class Own(Module):
    """A weight of its own beside layers, some of them in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.w = Weight("w", f32, (3,), cpu)
        self.inner = linear()
        self.items = [linear(), linear()]
        self.seq = Sequential([linear(), linear(2, 2)])

    def __call__(self, x: TensorValue) -> TensorValue:
        return x + self.w


class Sub(Module):
    """A layer whose constructor does not call the base's."""

    def __init__(self) -> None:
        self.x = linear()

    def __call__(self, x: TensorValue) -> TensorValue:
        return self.x(x)


class NoCall(Module):
    """A module without ``__call__``."""


class Sym(Module):
    """A weight with symbols in its shape."""

    def __init__(self, shape: Any = ("n", 3)) -> None:
        super().__init__()
        self.w = Weight("w", f32, shape, cpu)

    def __call__(self, x: TensorValue) -> TensorValue:
        return x


def values(module: Module) -> dict[str, np.ndarray]:
    return {n: arange(*map(int, w.shape)) for n, w in module.raw_state_dict().items()}


def names(module: Module) -> list[str]:
    return [w.name for w in module.raw_state_dict().values()]


def load(module: Module, state_dict: Any = None, **more: Any) -> Module:
    module.load_state_dict(values(module) if state_dict is None else state_dict, **more)
    return module


def quiet(module: Module, state_dict: Any, **more: Any) -> Mapping[str, Any]:
    module.load_state_dict(state_dict, **more)
    return {n: tuple(v.shape) for n, v in module.state_dict().items()}


def run(module: Any) -> Any:
    with Graph("g", input_types=[TensorType(f32, (5, 3), cpu)]) as graph:
        graph.output(module(graph.inputs[0].tensor))
    return graph.output_types


PROGRAMS = r"""
list(Two().raw_state_dict())
list(Own().raw_state_dict())
list(Own().layer_weights)
list(Own().sublayers)
Own().sublayers["items"] if "items" in Own().sublayers else None
list(Two().sublayers)
names(Two())
names(Own())
Two().state_dict()
list(load(Two()).state_dict())
load(Two()).state_dict()["a.weight"]
load(Two(),{})
load(Two(),{"a.weight":A(2,3)})
load(Two(),{"a.weight":A(2,3)},strict=False)
quiet(Two(),{"a.weight":A(2,3)},strict=False)
load(Two(),{**sd(Two()),"extra":A(2)})
load(Two(),{**sd(Two()),"a.weight":A(3,2)})
load(Two(),{**sd(Two()),"a.weight":A(6)})
load(Two(),{**sd(Two()),"a.weight":A(2,3).astype(np.float64)})
load(Two(),{**sd(Two()),"a.weight":A(2,3).astype(np.int32)})
load(Two(),{**sd(Two()),"a.weight":A(2,3).astype(np.float16)})
load(Two(),{**sd(Two()),"a.weight":A(2,3).tolist()})
load(Two(),{**sd(Two()),"a.weight":None})
load(Two(),{**sd(Two()),"a.weight":3})
load(Two(),{**sd(Two()),"a.weight":A(3,2).T})
load(Two(),{**sd(Two()),"a.weight":Tensor.from_numpy(A(2,3))})
load(Two(),{**sd(Two()),"a.weight":WeightData.from_numpy(A(2,3),"a.weight")})
load(Two(),{**sd(Two()),"a.weight":WeightData.from_numpy(A(3,2),"a.weight")})
load(Two(),{**sd(Two()),"a.weight":WeightData.from_numpy(A(2,3).astype(np.float16),"q")})
load(Two(),sd(Two()),override_quantization_encoding=True)
load(Two(),sd(Two()),weight_alignment=1)
load(Two(),sd(Two()),weight_alignment=0)
load(Two(),sd(Two()),foo=1)
load(Two(),list(sd(Two()).items()))
load(Two(),{1:A(2,3)})
x=A(2,3); x.flags.writeable=False; load(Two(),{**sd(Two()),"a.weight":x})
m=load(Two()); m.load_state_dict(sd(m)); 1
m=load(Two()); names(m)
quiet(Sym(),{"w":A(4,3)})
quiet(Sym(),{"w":A(4,5)})
quiet(Sym(),{"w":A(3)})
quiet(Sym(("n","n")),{"w":A(4,5)})
quiet(Sym(("n","n")),{"w":A(4,4)})
quiet(Sym(("n","m")),{"w":A(4,5)})
run(Two())
run(load(Two()))
run(Sub())
list(Sub().raw_state_dict())
NoCall()(1)
list(NoCall().raw_state_dict())
Module()
Module().raw_state_dict()
Module()(3)
Layer()
Layer()(3)
Module().layer_weights
m=Two(); m.a=L(3,2,has_bias=True); list(m.raw_state_dict())
m=Two(); del m.a; list(m.raw_state_dict())
m=Two(); m.a=None; list(m.raw_state_dict())
m=Two(); m.c=m.a; list(m.raw_state_dict())
m=Two(); m.w=Weight("zzz",f32,(3,),cpu); list(m.raw_state_dict())
m=Two(); m.w=Weight("zzz",f32,(3,),cpu); names(m)
m=Two(); m.w=Weight("zzz",f32,(3,),cpu); load(m); names(m)
m=Two(); m.ws=[Weight("p",f32,(3,),cpu),Weight("q",f32,(3,),cpu)]; list(m.raw_state_dict())
m=Two(); m.ws=LayerList([L(),L()]); list(m.raw_state_dict())
m=Two(); m.ws=(L(),L()); list(m.raw_state_dict())
m=Two(); m.ws={"p":L()}; list(m.raw_state_dict())
m=Two(); m.ws=[]; list(m.raw_state_dict())
m=Two(); m.b.weight=m.a.weight; list(m.raw_state_dict())
m=Two(); m.set_shared_weight("w2",m.a.weight); list(m.raw_state_dict())
m=Two(); m.set_shared_weight("w2",m.a.weight); m.w2.name
m=Two(); m.b.set_shared_weight("weight",m.a.weight); list(m.raw_state_dict())
m=Two(); m.b.set_shared_weight("weight",m.a.weight); load(m); names(m)
m=Two(); m.set_shared_weight("w2",3)
m=L(); m.set_shared_weight("bias",m.weight); list(m.raw_state_dict())
m=Sequential([L(),L(2,2)]); list(m.raw_state_dict())
m=Sequential([L(),L(2,2)]); run(m)
Sequential([])
Sequential([])(3)
Sequential(L(),L(2,2))
list(Sequential((L(),L(2,2))).raw_state_dict())
list(Sequential(layers=[L(),L(2,2)]).raw_state_dict())
Sequential([L(),L(2,2)])[0]
len(Sequential([L(),L(2,2)]))
list(Sequential([ops.relu,L()]).raw_state_dict())
Sequential([ops.relu,L()])
Sequential([L(),3])
Sequential([L(),ops.relu]); 1
run(Sequential([L(),ops.relu]))
run(Sequential([L(),lambda x:x+1]))
list(LayerList([L(),L()]).raw_state_dict())
len(LayerList([L(),L()]))
LayerList([L(),L()])[0]
LayerList([L(),L()])[5]
LayerList([L(),L()])[-1]
LayerList([L(),L()])[0:1]
[type(l).__name__ for l in LayerList([L(),L()])]
l=LayerList([L(),L()]); l[0]=L(4,4); l[0].weight.shape
l=LayerList([L(),L()]); del l[0]; len(l)
l=LayerList([L(),L()]); l.append(L()); len(l)
l=LayerList([L(),L()]); l.insert(0,L(7,7)); l[0].weight.shape
l=LayerList([L(),L()]); l.extend([L()]); len(l)
l=LayerList([L(),L()]); l+=[L()]; len(l)
LayerList([L(),L()])(3)
LayerList([])
LayerList()
LayerList([3])
list(LayerList((L(),)).raw_state_dict())
L()==L()
m=Two(); Module.__call__(m,1)
m=Two(); m.build_subgraph("s",[TensorType(f32,(5,3),cpu)])
import copy; copy.deepcopy(Two()).raw_state_dict()
import copy; copy.copy(Two()).raw_state_dict()
recursive_named_layers(Two())
[(n,type(l).__name__) for n,l in recursive_named_layers(Two())]
[(n,type(l).__name__) for n,l in recursive_named_layers(Own())]
[(n,type(l).__name__) for n,l in recursive_named_layers(Two(),"p")]
m=Two(); m.quantization_encoding
"""


def described(value: Any) -> str | None:
    if type(value).__name__ in ("dict_keys", "list_iterator"):
        return str(list(value))
    return None


FAMILY = plain_family(
    PROGRAMS,
    {
        **{name: getattr(nn, name) for name in dir(nn) if name[0].isupper()},
        "np": np, "nn": nn, "ops": ops, "f32": f32, "cpu": cpu, "Weight": Weight, "Tensor": Tensor,
        "WeightData": WeightData,
        "Graph": Graph, "TensorType": TensorType, "recursive_named_layers": recursive_named_layers,
        "A": arange, "L": linear, "Two": Two, "Own": Own, "Sub": Sub, "NoCall": NoCall, "Sym": Sym,
        "sd": values, "names": names, "load": load, "quiet": quiet, "run": run,
    },
    first=described,
)  # fmt: skip
