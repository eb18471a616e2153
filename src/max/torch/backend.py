"""The backend "max" of torch.compile, and what it takes of a model."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch._decomp import core_aten_decompositions
from torch._dynamo import list_backends, register_backend
from torch._dynamo.backends.common import aot_autograd
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner

from max.engine import InferenceSession
from max.importers.build import build_graph
from max.importers.errors import UnsupportedOpsError
from max.importers.torch.importer import TorchFramework
from max.importers.torch.reader import FxReader, op_name, source_line
from max.importers.torch.table import TABLE
from max.torch._convert import tensor_of, view_of

__all__ = ["Explanation", "explain", "max_backend"]

_warned = False


@dataclass
class Explanation:
    """What `torch.compile(model, backend="max")` takes of a model.

    Attributes:
        graphs: The number of graphs that run in MAX.
        taken: The number of ops that run in MAX.
        left: What runs in torch: the op, its line of the source program, and why.
        breaks: Why torch splits the program into several graphs.
    """

    graphs: int = 0
    taken: int = 0
    left: list[tuple[str, str, str]] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"{self.taken} ops in {self.graphs} graphs run in MAX, {len(self.left)} ops in torch"
        ]
        lines += [f"  {name} at {where or '?'}: {why}" for name, where, why in self.left]
        lines += [f"  a break of the graph: {reason}" for reason in self.breaks]
        return "\n".join(lines)


class _Support:
    """Which nodes have a function; for the partitioner."""

    def is_node_supported(self, submodules: Any, node: torch.fx.Node) -> bool:
        name = op_name(node)
        return node.op == "call_function" and (name == "getitem" or name in TABLE.ops)


class _Compiled:
    """A functional graph that runs in MAX. It is staged at the first call, and runs in torch if that fails."""

    def __init__(self, module: torch.fx.GraphModule, found: Explanation) -> None:
        self._module = module
        self._found = found
        self._lock = threading.Lock()
        self._run: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        run = self._run
        if run is None:
            with self._lock:
                run = self._run = self._run or self._staged()
        return run(*args)

    def _staged(self) -> Callable[..., Any]:
        nodes = [node for node in self._module.graph.nodes if node.op == "call_function"]
        try:
            run = self._loaded()
        except (UnsupportedOpsError, ValueError, TypeError, NotImplementedError) as error:
            if isinstance(error, UnsupportedOpsError):
                self._found.left += [(p.op, p.node, p.reason) for p in error.problems]
            else:
                self._found.left += [(op_name(n), source_line(n), str(error)) for n in nodes]
            return self._module.forward
        self._found.graphs += 1
        self._found.taken += sum(op_name(node) != "getitem" for node in nodes)
        return run

    def _loaded(self) -> Callable[..., Any]:
        graph = self._module.graph
        places = [node.name for node in graph.nodes if node.op == "placeholder"]
        (results,) = graph.find_nodes(op="output")[0].args
        single = isinstance(results, torch.fx.Node)
        listed: list[Any] = [results] if single else list(results)
        kept = [i for i, value in enumerate(listed) if isinstance(value, torch.fx.Node)]
        sizes = [not hasattr(listed[i].meta.get("val"), "shape") for i in kept]
        source = FxReader(graph, self._module, {}).read("main", None if single else kept)
        model = InferenceSession().load(build_graph(source, TorchFramework()))
        used = [places.index(name) for name, _ in source.inputs]

        def run(*args: Any) -> Any:
            tensors = [view_of(args[i].detach().contiguous()) for i in used]
            outputs: list[Any] = list(listed)
            for i, is_size, result in zip(kept, sizes, model.execute(*tensors), strict=True):
                outputs[i] = int(result.to_numpy()) if is_size else tensor_of(result)
            return outputs[0] if single else outputs

        return run


def _compiled(module: torch.fx.GraphModule, inputs: Sequence[Any], found: Explanation) -> Any:
    """A functional graph, of which the parts that have functions run in MAX."""
    support = _Support()
    missing = [
        node
        for node in module.graph.nodes
        if node.op == "call_function" and not support.is_node_supported({}, node)
    ]
    on_cpu = all(x.device.type == "cpu" for x in inputs if isinstance(x, torch.Tensor))
    if not on_cpu:
        found.left.append(("inputs", "", "tensors are on another device than the CPU"))
        return module.forward
    if not missing:
        return _Compiled(module, found)
    found.left += [(op_name(n), source_line(n), "the op has no function") for n in missing]
    partitioner = CapabilityBasedPartitioner(module, support, allows_single_node_partition=True)  # pyright: ignore[reportArgumentType]
    fused = partitioner.partition_and_fuse()
    for name, child in list(fused.named_children()):
        if name.startswith("fused_"):
            delattr(fused, name)
            setattr(fused, name, _Module(_Compiled(child, found)))  # pyright: ignore[reportArgumentType]
    fused.recompile()
    return fused.forward


class _Module(torch.nn.Module):
    """A compiled part as a submodule."""

    def __init__(self, compiled: _Compiled) -> None:
        super().__init__()
        self._compiled = compiled

    def forward(self, *args: Any) -> Any:
        return self._compiled(*args)


def max_backend(
    module: torch.fx.GraphModule, inputs: Sequence[Any], found: Explanation | None = None
) -> Callable[..., Any]:
    """The backend of ``torch.compile(model, backend="max")``.

    It compiles for inference. Where gradients are needed the graph runs in torch, with a warning, once; so do ops that
    have no function. Weights are read at each call, so that changes of them are seen.

    Args:
        module: The graph.
        inputs: Its example inputs.
        found: Gets what is taken.

    Returns:
        What runs the graph.
    """
    global _warned
    found = Explanation() if found is None else found
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in inputs):
        if not _warned:
            _warned = True
            warnings.warn(
                'torch.compile(backend="max") compiles for inference: gradients are needed here, so torch runs this; '
                "use torch.no_grad()",
                stacklevel=2,
            )
        found.left.append(("graph", "", "gradients are needed"))
        return module.forward
    compile_ = partial(_compiled, found=found)
    with torch.no_grad():
        return aot_autograd(fw_compiler=compile_, decompositions=core_aten_decompositions())(
            module, inputs
        )


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """What ``torch.compile(model, backend="max")`` takes of a model, and why not the rest.

    It runs the model twice, without gradients.

    Args:
        model: A module or function.
        args: The arguments of a call.
        kwargs: The arguments by name.
    """
    found = Explanation()
    with torch.no_grad():
        broken = torch._dynamo.explain(model)(*args, **kwargs)  # pyright: ignore[reportPrivateImportUsage]
        found.breaks = [str(reason.reason).splitlines()[0] for reason in broken.break_reasons]
        torch._dynamo.reset()  # pyright: ignore[reportPrivateImportUsage]
        torch.compile(model, backend=partial(max_backend, found=found))(*args, **kwargs)
    return found


if "max" not in list_backends(()):
    # an installed package has it as an entry point
    register_backend(max_backend, name="max")
