"""Graphs and custom ops as operations of PyTorch.

::

    import torch
    from max.graph import ops
    from max.torch import graph_op

    @graph_op
    def scaled(x, y):
        return ops.softmax(x) * y

    x, y = torch.rand(3, 4), torch.rand(3, 4)
    out = torch.empty_like(x)
    scaled(out, x, y)                # results come first, and are written

`from_exported` makes a program of `torch.export` a graph::

    program = torch.export.export(model.eval(), (x,))
    model = max.engine.InferenceSession().load(from_exported(program))

`from_script` makes a graph of a TorchScript module, `ScriptedModule` a function that keeps the module's state.

Needs torch: ``pip install 'supremum[torch]'``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(f"max.torch needs torch: {error}") from error

from max._names import lazy_names
from max.torch._convert import max_device_ref, max_dtype_to_torch, torch_dtype_to_max
from max.torch._library import CustomOp, CustomOpLibrary
from max.torch._operation import Operation, graph_op

if TYPE_CHECKING:
    from max.torch.backend import explain
    from max.torch.exported import from_exported
    from max.torch.scripted import ScriptedModule, from_script

__all__ = [
    "CustomOp",
    "CustomOpLibrary",
    "Operation",
    "ScriptedModule",
    "explain",
    "from_exported",
    "from_script",
    "graph_op",
    "max_device_ref",
    "max_dtype_to_torch",
    "torch_dtype_to_max",
]

__getattr__ = lazy_names(
    __name__,
    {
        "ScriptedModule": "max.torch.scripted",
        "explain": "max.torch.backend",
        "from_exported": "max.torch.exported",
        "from_script": "max.torch.scripted",
    },
)
"""The importer is loaded when it is first used."""
