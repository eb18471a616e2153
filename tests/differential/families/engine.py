"""`max.engine`: construction of sessions, arguments of `load` and `execute`, metadata of models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from max import driver, engine
from max.driver import CPU, DeviceSpec
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Graph, TensorType, Weight, ops
from tests.differential.families._plain import plain_family

D, f32, cpu = DType, DType.float32, DeviceRef.CPU()
Tensor = getattr(driver, "Tensor", None) or driver.Buffer


def added(name: str = "add", shape: Any = (2, 3)) -> Graph:
    """A sum of two inputs."""
    types = [TensorType(f32, shape, cpu)] * 2
    return Graph(name, lambda x, y: x + y, input_types=types)


def weighted() -> Graph:
    """An input plus the weight ``w``."""
    with Graph("w", input_types=[TensorType(f32, (3,), cpu)]) as graph:
        weight = graph.add_weight(Weight("w", f32, (3,), cpu))
        graph.output(graph.inputs[0].tensor + weight)
    return graph


def counted() -> Graph:
    """A buffer that each execution adds 1 to."""
    with Graph("buf", input_types=[BufferType(f32, (3,), cpu)]) as graph:
        buffer = graph.inputs[0].buffer
        ops.buffer_store(buffer, ops.buffer_load(buffer) + 1)
        graph.output()
    return graph


def namespace() -> Mapping[str, Any]:
    session = InferenceSession(devices=[CPU()])
    scalars = [TensorType(f32, (), cpu), TensorType(D.int64, (), cpu)]
    wide = [TensorType(f32, ("a", "b"), cpu)]
    return {
        **{name: getattr(engine, name) for name in dir(engine) if name[0].isupper()},
        "np": np, "Path": Path, "D": D, "DType": DType, "f32": f32, "CPU": CPU, "Tensor": Tensor,
        "DeviceRef": DeviceRef, "DeviceSpec": DeviceSpec,
        "A": lambda *s: np.arange(int(np.prod(s)), dtype=np.float32).reshape(s),
        "w3": np.array([1, 2, 3], np.float32),
        "S": session, "G": weighted(), "g1": added,
        "M": session.load(added()),
        "MS": session.load(added("sym", ("n", 3))),
        "MW": session.load(weighted(), weights_registry={"w": np.array([1, 2, 3], np.float32)}),
        "MSC": session.load(Graph("sc", lambda x, y: (x + 1, y + 1), input_types=scalars)),
        "MN": session.load(Graph("noin", lambda: ops.constant(2, f32, cpu), input_types=[])),
        "MB": session.load(counted()),
        "MM": session.load(Graph("multi", lambda x: (x, x * 2), input_types=wide)),
    }  # fmt: skip


PROGRAMS = r"""
InferenceSession()
InferenceSession([])
InferenceSession(devices=[]).devices
InferenceSession([CPU()]).devices
InferenceSession((CPU(),)).devices
InferenceSession(devices=CPU())
InferenceSession(CPU())
InferenceSession(devices=None)
InferenceSession(devices=["cpu"])
InferenceSession(devices="cpu")
InferenceSession(devices=[CPU(),CPU()]).devices
InferenceSession(devices=[DeviceRef.CPU()])
InferenceSession(devices=[DeviceSpec.cpu()])
InferenceSession(devices=iter([CPU()])).devices
InferenceSession(4,devices=[CPU()])
InferenceSession([CPU()],2)
InferenceSession([CPU()],num_threads=1)
InferenceSession([CPU()],num_threads=0)
InferenceSession([CPU()],num_threads=-1)
InferenceSession([CPU()],num_threads="a")
InferenceSession([CPU()],custom_extensions=None)
InferenceSession([CPU()],custom_extensions=[])
InferenceSession([CPU()],custom_extensions=3)
InferenceSession([CPU()],foo=1)
type(S.devices)
S.load(None)
S.load(3)
S.load("")
S.load()
S.load(model=g1("m2")).input_metadata[0].shape
S.load(g1("c"),custom_extensions=[])
S.load(g1("c"),weights_registry={})
S.load(g1("c"),weights_registry=None)
S.load(g1("c"),{})
S.load(g1("c"),weights_registry={"extra":w3})
S.load(G)
S.load(G,weights_registry={})
S.load(G,weights_registry={"w":w3,"extra":w3}).execute(w3)
S.load(G,weights_registry={"x":w3})
S.load(G,weights_registry={"w":np.zeros(4,np.float32)})
S.load(G,weights_registry={"w":np.zeros((3,1),np.float32)})
S.load(G,weights_registry={"w":np.zeros(3,np.float64)})
S.load(G,weights_registry={"w":np.zeros(3,np.int32)})
S.load(G,weights_registry={"w":[1,2,3]})
S.load(G,weights_registry={"w":3})
S.load(G,weights_registry={"w":None})
S.load(G,weights_registry={"w":Tensor.from_numpy(w3)}).execute(w3)
S.load(G,weights_registry={"w":np.arange(6,dtype=np.float32)[::2]}).execute(w3)
S.load(G,weights_registry=[("w",w3)])
S.load(G,weights_registry={3:w3})
x=w3.copy(); x.flags.writeable=False; S.load(G,weights_registry={"w":x}).execute(w3)
M.execute(A(2,3),A(2,3))
M(A(2,3),A(2,3))
M.execute(A(2,3))
M.execute()
M.execute(A(2,3),A(2,3),A(2,3))
M.execute(A(2,4),A(2,3))
M.execute(A(6),A(2,3))
M.execute(A(2,3).astype(np.float64),A(2,3))
M.execute(A(2,3).astype(np.int32),A(2,3))
M.execute(A(2,3).tolist(),A(2,3))
M.execute(None,A(2,3))
M.execute("a",A(2,3))
M.execute(3,A(2,3))
M.execute(3.0,A(2,3))
M.execute(A(3,2).T,A(2,3))
M.execute(A(4,3)[::2],A(2,3))
M.execute(Tensor.from_numpy(A(2,3)),A(2,3))
M.execute(Tensor.from_numpy(A(4,3))[::2,:],A(2,3))
M.execute(input0=A(2,3),input1=A(2,3))
M(input0=A(2,3),input1=A(2,3))
M(A(2,3),input1=A(2,3))
M(A(2,3),foo=A(2,3))
M(A(2,3))
M(A(2,3),A(2,3),A(2,3))
M.execute([A(2,3),A(2,3)])
M.execute(*[A(2,3),A(2,3)])
type(M.execute(A(2,3),A(2,3)))
type(M.execute(A(2,3),A(2,3))[0]).__name__
x=A(2,3); x.flags.writeable=False; M.execute(x,A(2,3))
M.execute(A(2,3).astype('>f4'),A(2,3))
M.execute(DType.float32,A(2,3))
MS.execute(A(2,3),A(2,3))
MS.execute(A(0,3),A(0,3))
MS.execute(A(2,4),A(2,4))
MSC.execute(1.5,2)
MSC.execute(1,2)
MSC.execute(np.float32(1.5),np.int64(2))
MSC.execute(np.float64(1.5),np.int32(2))
MSC.execute(1.5,2.5)
MSC.execute(True,True)
MSC.execute("1",2)
MSC.execute(np.array(1.5,np.float32),np.array(2))
MSC.execute(A(1),2)
MSC(1.5,2)
MN.execute()
MN()
MN.execute(1)
t=Tensor.from_numpy(np.zeros(3,np.float32)); r=MB.execute(t); (r,t)
x=np.zeros(3,np.float32); r=MB.execute(x); (r,x)
x=np.zeros(3,np.float32); x.flags.writeable=False; MB.execute(x)
t=Tensor.from_numpy(np.zeros(6,np.float32))[::2]; MB.execute(t)
MB.execute([1.,2.,3.])
MM.execute(A(2,2))
MW.execute(w3)
M.input_metadata
M.output_metadata
repr(M.input_metadata[0])
str(M.input_metadata[0])
M.input_metadata[0].name
M.input_metadata[0].shape
M.input_metadata[0].dtype
type(M.input_metadata)
type(M.input_metadata[0].shape)
MS.input_metadata[0].shape
MS.output_metadata[0].shape
MS.output_metadata[0].name
MS.output_metadata[0].dtype
repr(MS.input_metadata[0])
MM.output_metadata
MM.input_metadata
MN.input_metadata
MN.output_metadata
MB.input_metadata
MB.output_metadata
MSC.input_metadata
MSC.input_metadata[0].shape
TensorSpec()
S.set_mojo_log_level("info")
S.set_mojo_log_level(LogLevel.INFO)
S.set_mojo_log_level("foo")
S.set_mojo_log_level(3)
S.set_mojo_log_level("INFO")
S.set_mojo_assert_level(3)
S.set_mojo_assert_level("none")
S.set_split_k_reduction_precision("accum")
S.set_split_k_reduction_precision("foo")
S.set_split_k_reduction_precision("output")
S.set_split_k_reduction_precision("ACCUM")
S.use_old_top_k_kernel("on")
S.use_old_top_k_kernel("false")
S.use_old_top_k_kernel(True)
S.use_old_top_k_kernel(3)
S.gpu_profiling(GPUProfilingMode.OFF)
S.gpu_profiling("off")
S.gpu_profiling("foo")
S.gpu_profiling(GPUProfilingMode.OFF)
S.set_debug_print_options()
S.set_debug_print_options("FULL")
S.set_debug_print_options("COMPACT")
S.set_debug_print_options("NONE")
S.set_debug_print_options("foo")
S.set_debug_print_options(style="FULL",precision=3)
S.set_debug_print_options("FULL",3)
S.set_debug_print_options("FULL",-3)
S.set_debug_print_options("FULL","a")
LogLevel("info")
LogLevel.INFO=="info"
str(LogLevel.INFO)
f"{LogLevel.INFO}"
GPUProfilingMode("on")
[m.value for m in LogLevel]
str(MM.input_metadata[0])
str(MSC.input_metadata[0])
repr(M)
str(M)
MSC.execute(np.bool_(True),np.bool_(True))
MSC.execute(np.float16(1.5),np.uint8(2))
MSC.execute(1.5,np.float32(2))
MSC.execute(1.5,np.complex64(2))
"""


def described(value: Any) -> str | None:
    return str(value) if type(value).__name__ == "TensorSpec" else None


FAMILY = plain_family(PROGRAMS, namespace, first=described)
