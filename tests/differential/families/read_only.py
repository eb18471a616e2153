"""Read-only memory: arrays, bytes and mapped files whose tensors, views of them and arrays of theirs are written."""

from __future__ import annotations

import contextlib
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from max import driver
from max.driver import CPU
from max.dtype import DType
from tests.differential.families._plain import plain_family

Tensor = getattr(driver, "Tensor", None) or driver.Buffer


def fixed(*shape: int) -> np.ndarray:
    """A read-only array of 0, 1, 2, …"""
    array = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    array.flags.writeable = False
    return array


class File:
    """A file of 0, 1, 2, … that lives as long as the object."""

    def __init__(self, count: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.path = Path(self._folder.name) / "elements"
        np.arange(count, dtype=np.float32).tofile(self.path)

    def read(self) -> list[float]:
        return np.fromfile(self.path, np.float32).tolist()

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self._folder.cleanup()


NAMESPACE: dict[str, Any] = {
    "np": np, "Tensor": Tensor, "CPU": CPU, "f32": DType.float32, "si32": DType.int32, "A": fixed, "File": File,
}  # fmt: skip
#: How ``t`` comes from read-only memory, and what shows that memory afterwards.
SOURCES = (
    ("a=A(2,3); t=Tensor.from_numpy(a)", "a.tolist()"),
    ("a=A(2,3); t=Tensor.from_dlpack(a)", "a.tolist()"),
    ("a=A(2,3); t=Tensor.from_dlpack(a,copy=True)", "a.tolist()"),
    ("a=A(2,3); t=Tensor.from_numpy(a).to(CPU())", "a.tolist()"),
    ("b=A(2,3).tobytes(); t=Tensor.from_numpy(np.frombuffer(b,np.float32).reshape(2,3))", "len(b)"),
    ("f=File(6); t=Tensor.from_numpy(np.memmap(f.path,np.float32,'r',shape=(2,3)))", "f.read()"),
    ("f=File(6); t=Tensor.mmap(f.path,f32,(2,3),mode='r')", "f.read()"),
    ("f=File(6); t=Tensor.mmap(f.path,f32,(2,3),mode='readonly')", "f.read()"),
    ("f=File(6); t=Tensor.mmap(f.path,f32,(2,3),mode='c')", "f.read()"),
    ("f=File(6); t=Tensor.mmap(f.path,f32,(2,3))", "f.read()"),
    ("f=File(6); t=Tensor.mmap(f.path,f32,(2,3),mode='r+')", "f.read()"),
    ("f=File(9); t=Tensor.mmap(f.path,f32,(2,3),mode='r',offset=8)", "f.read()"),
)
#: Views, and writes; ``v`` is a view of ``t``, or ``t``.
VIEWS = (
    "v=t",
    "v=t[1:,:]",
    "v=t[:,1:2]",
    "v=t.view(f32,(6,))",
    "v=t.view(si32,(3,2))",
    "v=t[0:1,0:3]",
)
WRITES = (
    "i=(0,)*v.rank; v[i]=9",
    "i=(0,)*v.rank; v[i]=9; t[1,2]=7",
    "t[1,1]=5; i=(0,)*v.rank; v[i]=9",
    "t.inplace_copy_from(Tensor.zeros((2,3),f32))",
    "w=v.copy(); i=(0,)*w.rank; w[i]=9",
    "w=t.to(CPU()); w[1,2]=8",
)


def drawn(seed: int) -> list[str]:
    draw = random.Random(seed)
    lines: list[str] = []
    for source, shown in SOURCES:
        for write in WRITES:
            for view in draw.sample(VIEWS, 2):
                lines.append(
                    f"{source}; {view}; {write}; (t.to_numpy().tolist(),v.to_numpy().tolist(),{shown})"
                )
    return lines


FAMILY = plain_family("", NAMESPACE, more=drawn)
