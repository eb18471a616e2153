"""`max.driver`: construction, indexing, views, copies and conversions of tensors; devices, streams, specifications."""

from __future__ import annotations

import random

import numpy as np

from max import driver
from max.driver import CPU
from max.dtype import DType
from tests.differential.families._plain import plain_family

Tensor = getattr(driver, "Tensor", None) or driver.Buffer


def arange(*shape: int) -> np.ndarray:
    return np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)


class NoArray:
    """An object without DLPack."""


PROGRAMS = r"""
Tensor(f32,(2,3)).shape
Tensor(f32,[2,3]).shape
Tensor(shape=(2,3),dtype=f32).dtype
Tensor((2,3),f32)
Tensor(f32,(2,3),CPU()).device
Tensor(f32,(2,3),device=CPU()).device
Tensor(f32,(2,3),device=CPU(),pinned=False).pinned
Tensor(f32,(2,3),device=CPU(),pinned=True).pinned
Tensor(f32,(2,3),pinned=True).pinned
Tensor(f32,(2,3),None,True).pinned
Tensor(f32,(2,3),CPU().default_stream).shape
Tensor(f32,(2,3),stream=CPU().default_stream).shape
Tensor(A(2,3),CPU())
Tensor(A(2,3))
Tensor(shape=A(2,3),device=CPU())
Tensor()
Tensor(f32)
Tensor(f32,()).shape
Tensor(f32,3)
Tensor(f32,(0,3)).shape
Tensor(f32,(-1,3))
Tensor(f32,(2.0,3))
Tensor(f32,("a",3))
Tensor("float32",(2,3))
Tensor(np.float32,(2,3))
Tensor(f32,(2,3),"cpu")
Tensor(f32,(2,3),device="cpu")
Tensor(f32,(True,2)).shape
Tensor(f32,np.array([2,3])).shape
Tensor(f32,(np.int64(2),3)).shape
Tensor(f32,"ab")
Tensor(f32,{2,3})
Tensor(f32,range(2,4)).shape
Tensor.zeros((2,3),f32)
Tensor.zeros([2,3],f32)
Tensor.zeros(shape=[2,3],dtype=f32)
Tensor.zeros(f32,(2,3))
Tensor.zeros((2,3))
Tensor.zeros((2,3),dtype=f32,device=CPU())
Tensor.zeros((2,3),f32,CPU())
Tensor.zeros((),f32)
Tensor.zeros(3,f32)
Tensor.zeros((2,),D.bool)
Tensor.zeros((2,),D.bfloat16)
Tensor.zeros((2,),D.float8_e4m3fn)
Tensor.zeros((2,3),f32,stream=CPU().default_stream)
Tensor.zeros((2,3),f32,pinned=True)
Tensor.zeros((2,-3),f32)
Tensor.zeros((2,3),"float32")
Tensor.scalar(3,D.int32)
Tensor.scalar(3.5,D.float32)
Tensor.scalar(3.5,D.int32)
Tensor.scalar(3,D.float32)
Tensor.scalar(True,D.bool)
Tensor.scalar(2,D.bool)
Tensor.scalar(300,D.uint8)
Tensor.scalar(-1,D.uint8)
Tensor.scalar(2**70,D.int64)
Tensor.scalar(3)
Tensor.scalar("a",D.int32)
Tensor.scalar(None,D.int32)
Tensor.scalar(np.float32(2),D.float32)
Tensor.scalar(np.int64(2),D.float32)
Tensor.scalar(np.array(2),D.int32)
Tensor.scalar(np.array([2]),D.int32)
Tensor.scalar([2],D.int32)
Tensor.scalar(1j,D.float32)
Tensor.scalar(3,D.int32,CPU())
Tensor.scalar(3,D.int32,device=CPU())
Tensor.scalar(value=3,dtype=D.int32)
Tensor.scalar(float('nan'),D.int32)
Tensor.scalar(float('nan'),D.float32).item()!=0
Tensor.scalar(1e300,D.float32)
Tensor.scalar(1.5,D.bfloat16).shape
Tensor.scalar(1.5,D.bfloat16).item()
Tensor.scalar(1.5,D.float16).item()
Tensor.scalar(1,D.float8_e4m3fn)
Tensor.scalar(3,D.int32).item()
Tensor.scalar(True,D.bool).item()
Tensor.scalar(True,D.int32).item()
Tensor.scalar(3,D.uint64).item()
Tensor.from_numpy(A(2,3))
Tensor.from_numpy(A(2,3).T)
Tensor.from_numpy(A(2,3).T).is_contiguous
Tensor.from_numpy(A(4,3)[::2])
Tensor.from_numpy(A(4,3)[::-1])
Tensor.from_numpy(np.array(3.0))
Tensor.from_numpy(np.float32(3))
Tensor.from_numpy([1,2])
Tensor.from_numpy(3)
Tensor.from_numpy(np.array([1,2],dtype=object))
Tensor.from_numpy(np.array(["a"]))
Tensor.from_numpy(np.array([1j]))
Tensor.from_numpy(np.array([True,False]))
Tensor.from_numpy(np.array([True,False])).dtype
Tensor.from_numpy(np.zeros((0,3),np.float32)).shape
Tensor.from_numpy(np.array([1,2],dtype='>i4'))
Tensor.from_numpy(np.array(['2020-01-01'],dtype='datetime64[D]'))
Tensor.from_numpy(np.zeros(2,np.longdouble))
Tensor.from_numpy(arr=A(2))
x=A(2,3); x.flags.writeable=False; Tensor.from_numpy(x)
x=A(2,3); x.flags.writeable=False; t=Tensor.from_numpy(x); t[0,0]=5; (x[0,0],t[0,0].item())
x=A(2,3); t=Tensor.from_numpy(x); t[0,0]=5; x[0,0]
x=A(2,3); t=Tensor.from_numpy(x); x[0,0]=7; t[0,0].item()
Tensor.from_dlpack(A(2,3))
Tensor.from_dlpack(A(2,3).T)
Tensor.from_dlpack(A(2,3).T).is_contiguous
Tensor.from_dlpack(A(4,3)[::2]).is_contiguous
Tensor.from_dlpack(A(4,3)[::-1]).is_contiguous
Tensor.from_dlpack(NoDl())
Tensor.from_dlpack([1])
Tensor.from_dlpack(3)
Tensor.from_dlpack(None)
Tensor.from_dlpack(np.array([True]))
Tensor.from_dlpack(np.array([1j]))
Tensor.from_dlpack(np.array(["a"]))
Tensor.from_dlpack(A(2),copy=True)
Tensor.from_dlpack(A(2),copy=False)
Tensor.from_dlpack(A(2),copy=None)
Tensor.from_dlpack(A(2),True)
Tensor.from_dlpack(array=A(2))
x=A(2); t=Tensor.from_dlpack(x,copy=True); x[0]=9; t[0].item()
x=A(2); t=Tensor.from_dlpack(x); x[0]=9; t[0].item()
x=A(2); x.flags.writeable=False; Tensor.from_dlpack(x)
x=A(2); x.flags.writeable=False; Tensor.from_dlpack(x,copy=False)
x=A(2); x.flags.writeable=False; t=Tensor.from_dlpack(x); t[0]=3; (x[0],t[0].item())
t=T(2,3); u=Tensor.from_dlpack(t); u is t
t=T(2,3); u=Tensor.from_dlpack(t); u[0,0]=9; t[0,0].item()
t=T(2,3); u=Tensor.from_dlpack(t,copy=True); u[0,0]=9; t[0,0].item()
Tensor.from_dlpack(T(4,3)[::2]).is_contiguous
np.from_dlpack(T(2,3))
np.from_dlpack(T(4,3)[::2])
np.from_dlpack(Tensor.zeros((2,),D.bfloat16))
T(2,3).__dlpack_device__()
T(3)[0]
T(3)[-1]
T(3)[3]
T(3)[-4]
T(2,3)[0]
T(2,3)[0,1]
T(2,3)[0,1].item()
T(2,3)[0,1].shape
T(2,3)[0,1,2]
T(2,3)[5]
T(2,3)[0,5]
T(2,3)[0:1]
T(2,3)[:,1]
T(2,3)[:,1].is_contiguous
T(2,3)[:,1:]
T(2,3)[...]
T(2,3)[...,0]
T(2,3)[0,...]
T(2,3)[...,...]
T(2,3)[None]
T(2,3)[:,None]
T(2,3)[()]
T()[()]
T()[0]
T(2,3)[True]
T(2,3)[[0,1]]
T(2,3)[np.array([0,1])]
T(2,3)[np.int64(1)]
T(2,3)[1.0]
T(2,3)["a"]
T(2,3)[T(2)]
T(2,3)[::-1]
T(2,3)[::-1].is_contiguous
T(6)[::2]
T(6)[::2].is_contiguous
T(6)[1:100]
T(6)[4:2]
T(6)[4:2].shape
T(6)[-2:]
T(6)[::0]
T(6)[5:0:-2]
T(6)[1:5:2]
T(6)[np.int64(1):np.int64(3)]
T(2,3)[0:2,1:3].contiguous()
T(2,3)[0:2,1:3].is_contiguous
T(2,3)[:1].is_contiguous
T(2,3)[0].is_contiguous
T(1,3)[:,1:2].is_contiguous
t=T(2,3); t[0,0]=7; t
t=T(2,3); t[0,0]=7.5; t
t=T(2,3); t[0,0]="a"
t=T(2,3); t[0,0]=None
t=T(2,3); t[0,0]=np.float32(3); t
t=T(2,3); t[0,0]=np.array(3); t
t=T(2,3); t[0,0]=np.array([3]); t
t=T(2,3); t[0,0]=Tensor.scalar(3,f32); t
t=T(2,3); t[0]=7; t
t=T(2,3); t[0]=T(3); t
t=T(2,3); t[0]=A(3); t
t=T(2,3); t[:]=7; t
t=T(2,3); t[...]=7; t
t=T(2,3); t[0:1]=7; t
t=T(2,3); t[0:1]=A(1,3)+5; t
t=T(2,3); t[5,0]=1
t=T(2,3); t[0,0,0]=1
t=T(); t[()]=3; t
t=T(); t[0]=3; t
t=T(3); t[-1]=3; t
t=T(3); t[3]=3
t=Tensor.zeros((2,),D.int32); t[0]=2.7; t
t=Tensor.zeros((2,),D.int32); t[0]=2; t
t=Tensor.zeros((2,),D.uint8); t[0]=300; t
t=Tensor.zeros((2,),D.uint8); t[0]=-1; t
t=Tensor.zeros((2,),D.bool); t[0]=2; t
t=Tensor.zeros((2,),D.bfloat16); t[0]=2; t[0].item()
t=Tensor.zeros((2,),D.bfloat16); t[0].item()
t=Tensor.zeros((2,),D.float8_e4m3fn); t[0].item()
t=T(2,3); t[0].to_numpy()[0]=9; t[0,0].item()
t=T(2,3); u=t[1]; u[0]=9; t
t=T(2,3); u=t[::2]; u[0,0]=9; t
T(2,3).item()
T(1).item()
T().item()
T(1,1).item()
T(2,3).item(0)
len(T(2,3))
len(T())
list(T(3))
[x.shape for x in T(2,3)]
bool(T(1))
bool(T(3))
float(T(1))
int(T())
float(T())
T(2)==T(2)
T(2)!=T(2)
T(2)+T(2)
T(2)+1
-T(2)
repr(T(2))
str(T(2))
repr(T(2,3))
repr(T(0))
repr(Tensor.scalar(3,D.int32))
repr(Tensor.zeros((3,),D.bfloat16))
repr(CPU())
str(CPU())
T(2,3).rank
T(2,3).num_elements
T().num_elements
T(0,3).num_elements
T(2,3).element_size
T(2,3).is_host
type(T(2,3).shape)
T(2,3).shape==(2,3)
T(2,3).shape==[2,3]
T(2,3).dtype
T(2,3).device==CPU()
T(2,3).view(D.int32)
T(2,3).view(D.int32).shape
T(2,3).view(D.uint8).shape
T(2,4).view(D.float64).shape
T(2,3).view(D.float64)
T(2,3).view(D.float64,(3,)).shape
T(2,3).view(f32,(3,2))
T(2,3).view(f32,(6,))
T(2,3).view(f32,(7,))
T(2,3).view(f32,(-1,))
T(2,3).view(f32,(-1,2)).shape
T(2,3).view(f32,[3,2]).shape
T(2,3).view(f32,6).shape
T(2,3).view(D.uint8,(2,3,4)).shape
T(2,3).view(D.uint8,(5,))
T(2,3).view((3,2))
T(2,3).view("int32")
T(4,3)[::2].view(f32,(6,))
T(4,3)[::2].view(D.int32).shape
T(4,3)[1:].view(D.int32).shape
T(3).view(D.float64)
T().view(D.int32).shape
T().view(D.uint8).shape
T().view(D.uint8)
t=T(2,3); v=t.view(f32,(6,)); v[0]=9; t[0,0].item()
T(2,3).copy()
T(2,3).copy(CPU())
T(2,3).copy(device=CPU())
T(2,3).copy(None)
T(2,3).copy(stream=CPU().default_stream)
T(2,3).copy(CPU().default_stream)
T(2,3).copy("cpu")
T(4,3)[::2].copy()
T(4,3)[::2].copy().is_contiguous
T(2,3)[::-1].copy()
t=T(2); u=t.copy(); u[0]=9; t[0].item()
T(2,3).to(CPU())
t=T(2); t.to(CPU()) is t
t=T(2); u=t.to(CPU()); u[0]=9; t[0].item()
T(2).to([CPU(),CPU()])
T(2).to((CPU(),))
T(2).to([])
T(2).to(CPU().default_stream)
T(2).to([CPU().default_stream])
T(2).to("cpu")
T(2).to(device=CPU())
T(2).to(devices=[CPU()])
T(2).to(stream=CPU().default_stream)
T(2).to()
T(2).to(None)
T(2).to([CPU(),"x"])
T(4,3)[::2].to(CPU()).is_contiguous
t=T(2,3); t.inplace_copy_from(Tensor.zeros((2,3),f32)); t
t=T(2,3); t.inplace_copy_from(Tensor.zeros((3,2),f32)); t
t=T(2,3); t.inplace_copy_from(Tensor.zeros((6,),f32)); t
t=T(2,3); t.inplace_copy_from(Tensor.zeros((5,),f32)); t
t=T(2,3); t.inplace_copy_from(Tensor.zeros((2,3),D.int32)); t
t=T(2,3); t.inplace_copy_from(Tensor.zeros((2,3),D.float64)); t
t=T(2,3); t.inplace_copy_from(Tensor.zeros((2,3),D.float16)); t
t=T(2,3); t.inplace_copy_from(Tensor.zeros((3,),D.float64)); t
t=T(2,3); t.inplace_copy_from(T(4,3)[::2]); t
t=T(4,3); t[::2].inplace_copy_from(T(2,3)); t
t=T(2,3); t.inplace_copy_from(A(2,3)); t
t=T(2,3); t.inplace_copy_from(None)
t=T(2,3); t.inplace_copy_from(src=T(2,3))
t=T(4); t[0:2].inplace_copy_from(t[2:4]); t
t=T(4); t[1:].inplace_copy_from(t[:3]); t
t=T(0,3); t.inplace_copy_from(T(0,3)); t.shape
T(4,3)[::2].contiguous()
t=T(2,3); t.contiguous() is t
t=T(2,3); u=t.contiguous(); u[0,0]=9; t[0,0].item()
T(4,3)[::2].to_numpy()
t=T(2,3); t.to_numpy()[0,0]=9; t[0,0].item()
Tensor.zeros((2,),D.bfloat16).to_numpy()
Tensor.zeros((2,),D.float8_e4m3fn).to_numpy()
Tensor.zeros((2,),D.float8_e5m2).to_numpy()
np.asarray(T(2,3))
np.array(T(2,3))
np.sum(T(2,3))
T(2,3).numpy()
T(2,3).tolist()
T(2,3).T
T(2,3).reshape((3,2))
T(2,3).astype(D.int32)
T(2,3).ndim
T(2,3).size
T(2,3).nbytes
T(2,3).data_ptr()>0
t=T(2); t.shape=(1,2)
t=T(2); t.foo=1
import copy; copy.copy(T(2))
import copy; copy.deepcopy(T(2))
import pickle; pickle.loads(pickle.dumps(T(2)))
CPU()==CPU()
CPU() is CPU()
CPU(0)==CPU()
CPU(id=0)
CPU(-1).id
CPU("a")
CPU().id
CPU().label
CPU().api
CPU().architecture_name
CPU().is_host
CPU().is_compatible
CPU().can_access(CPU())
CPU().can_access(3)
CPU().synchronize()
CPU().default_stream.synchronize()
CPU().default_stream.device
CPU().default_stream==CPU().default_stream
DeviceStream(CPU()).device
DeviceStream()
DeviceStream("cpu")
CPU().default_stream.wait_for(CPU().default_stream)
CPU().default_stream.wait_for(CPU())
CPU().default_stream.wait_for(3)
Device.cpu()
isinstance(CPU(),Device)
type(CPU())
Accelerator()
Accelerator(0)
accelerator_count()
accelerator_api()
accelerator_architecture_name()
DeviceSpec(0)
DeviceSpec(id=0)
DeviceSpec()
DeviceSpec(0,"gpu")
DeviceSpec(0,"tpu")
DeviceSpec(-1,"cpu")
DeviceSpec(0,"cpu")
DeviceSpec.cpu()
DeviceSpec.cpu(1)
DeviceSpec.accelerator()
DeviceSpec.accelerator(1)
DeviceSpec.accelerator(id=2)
DeviceSpec("a")
DeviceSpec.cpu()==DeviceSpec(0,"cpu")
DeviceSpec.cpu().device_type
x=DeviceSpec.cpu(); x.id=3
devices_exist([DeviceSpec.cpu()])
devices_exist([DeviceSpec.accelerator()])
devices_exist([])
devices_exist([DeviceSpec.cpu(),DeviceSpec.accelerator()])
devices_exist(DeviceSpec.cpu())
devices_exist([DeviceSpec(7,"cpu")])
load_devices([DeviceSpec.cpu()])
load_devices([DeviceSpec.accelerator()])
load_devices([])
load_devices([DeviceSpec.cpu(),DeviceSpec.cpu()])
load_devices([DeviceSpec(3,"cpu")])
load_devices(DeviceSpec.cpu())
scan_available_devices()
Tensor.scalar(3.0,D.int32)
Tensor.scalar(np.float64(3.5),D.int32)
Tensor.scalar(np.float64(3.5),D.float16)
Tensor.scalar(np.int64(300),D.uint8)
t=Tensor.zeros((2,),D.int32); t[0]=np.float32(2.7); t
t=Tensor.zeros((2,),D.int32); t[0]=True; t
t=Tensor.zeros((2,),D.bool); t[0]=0.5; t
t=Tensor.zeros((2,),D.float32); t[0]=2**40; t
t=Tensor.zeros((2,),D.float16); t[0]=1e9; t
Tensor(f32,(2,3),pinned=True)[0:1,0:1].pinned
"""

DTYPES = [
    "int8",
    "uint8",
    "int16",
    "int32",
    "uint32",
    "int64",
    "float16",
    "float32",
    "float64",
    "bool",
]
NUMBERS = [
    "0", "1", "-1", "3", "127", "128", "255", "256", "-129", "2.0", "2.5", "-0.5", "1e10", "1e300", "True", "False",
    "np.float32(1.5)", "np.int64(7)", "np.uint8(200)", "np.bool_(True)", "float('inf')", "2**33", "2**63", "None",
    "'1'",
]  # fmt: skip


def drawn(seed: int) -> list[str]:
    """Indices with one part an axis, scalars, views, and copies between dtypes."""
    draw = random.Random(seed)
    found: list[str] = []

    def index(size: int) -> str:
        ends = [str(draw.randint(-size - 2, size + 2)), ""]
        form = draw.choice(["{0}", "{0}", "{0}:{1}", "{0}:{1}", ":", "{0}:{1}:{2}"])
        return form.format(
            draw.choice(ends[:1] if form == "{0}" else ends),
            draw.choice(ends),
            draw.choice([1, 2, 3, -1, -2]),
        )

    for _ in range(150):
        shape = [draw.randint(1, 4) for _ in range(draw.randint(1, 3))]
        made = f"T({', '.join(map(str, shape))})"
        parts = ", ".join(index(size) for size in shape)
        found.append(
            draw.choice(["{0}[{1}]", "{0}[{1}]", "{0}[{1}].shape", "{0}[{1}].contiguous()"]).format(
                made, parts
            )
        )
        single = ", ".join(str(draw.randint(-size - 1, size)) for size in shape)
        found.append(f"t = {made}; t[{single}] = {draw.choice(NUMBERS[:12])}; t")
    for _ in range(80):
        found.append(f"Tensor.scalar({draw.choice(NUMBERS)}, D.{draw.choice(DTYPES)})")
        found.append(
            f"t = Tensor.zeros((2,), D.{draw.choice(DTYPES)}); t[1] = {draw.choice(NUMBERS)}; t"
        )
    for _ in range(80):
        shape = tuple(draw.choice([1, 2, 3, 4, 8]) for _ in range(draw.randint(1, 3)))
        kind, other = draw.choice(DTYPES[:-1]), draw.choice(DTYPES[:-1])
        new = tuple(draw.choice([1, 2, 3, 4, 6, 8]) for _ in range(draw.randint(1, 2)))
        given = draw.choice(["", "", f", {new}"])
        found.append(f"Tensor.zeros({shape}, D.{kind}).view(D.{other}{given}).shape")
        found.append(
            f"t = Tensor.zeros({shape}, D.{kind}); t.inplace_copy_from(Tensor.zeros({draw.choice([shape, new])}, "
            f"D.{draw.choice([kind, other])})); t"
        )
    return found


FAMILY = plain_family(
    PROGRAMS,
    {
        **{name: getattr(driver, name) for name in dir(driver) if not name.startswith("_")},
        "CPU": CPU,
        "np": np,
        "D": DType,
        "DType": DType,
        "f32": DType.float32,
        "A": arange,
        "T": lambda *shape: Tensor.from_numpy(arange(*shape).copy()),
        "Tensor": Tensor,
        "NoDl": NoArray,
    },
    drawn,
)
