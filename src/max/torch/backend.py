"""The backend "max" of torch.compile, and what it takes of a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch._dynamo import list_backends, register_backend
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner

from max._host.process_caches import cached_results
from max.importers.torch.decompositions import decompositions
from max.importers.torch.reader import op_name, source_line
from max.importers.torch.table import TABLE
from max.torch.compiled import CompiledGraph

__all__ = ["Explanation", "explain", "max_backend"]


@dataclass
class Explanation:
    """What `torch.compile(model, backend="max")` takes of a model.

    Attributes:
        graphs: The number of graphs that run in MAX.
        num_taken: The number of ops that run in MAX.
        left: What runs in torch: the op, its line of the source program, and why.
        breaks: Why torch splits the program into several graphs.
    """

    graphs: int = 0
    num_taken: int = 0
    left: list[tuple[str, str, str]] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)

    def compiled(self, module: torch.fx.GraphModule, static: Collection[int]) -> CompiledGraph:
        """A graph that runs in MAX, and tells here what of it does not."""
        return CompiledGraph(module, static, self._take, lambda *reason: self.left.append(reason))

    def _take(self, count: int) -> None:
        self.graphs += 1
        self.num_taken += count

    def __str__(self) -> str:
        lines = [
            f"{self.num_taken} ops in {self.graphs} graphs run in MAX, {len(self.left)} ops in torch"
        ]
        lines += [f"  {name} at {where or '?'}: {why}" for name, where, why in self.left]
        lines += [f"  a break of the graph: {reason}" for reason in self.breaks]
        return "\n".join(lines)


class _Support:
    """Which nodes have a function; for the partitioner."""

    def is_node_supported(self, submodules: Any, node: torch.fx.Node) -> bool:
        name = op_name(node)
        return node.op == "call_function" and (name == "getitem" or name in TABLE.ops)


def _compile_module(
    module: torch.fx.GraphModule, inputs: Sequence[Any], explanation: Explanation
) -> Any:
    """A functional graph, of which the parts that have functions run in MAX."""
    support = _Support()
    missing = [
        node
        for node in module.graph.nodes
        if node.op == "call_function" and not support.is_node_supported({}, node)
    ]
    on_cpu = all(x.device.type == "cpu" for x in inputs if isinstance(x, torch.Tensor))
    if not on_cpu:
        explanation.left.append(("inputs", "", "tensors are on another device than the CPU"))
        return module.forward
    static = _static_places(module)
    if not missing:
        return explanation.compiled(
            module, [i for i, n in enumerate(_places(module)) if n in static]
        )
    explanation.left += [(op_name(n), source_line(n), "the op has no function") for n in missing]
    partitioner = CapabilityBasedPartitioner(module, support, allows_single_node_partition=True)  # pyright: ignore[reportArgumentType]
    fused = partitioner.partition_and_fuse()
    for name, child in list(fused.named_children()):
        if name.startswith("fused_"):
            (node,) = [n for n in fused.graph.nodes if n.op == "call_module" and n.target == name]
            # the child's operands that are parameters or buffers of the whole graph
            of_child = [i for i, argument in enumerate(node.args) if argument in static]
            delattr(fused, name)
            setattr(fused, name, _Module(explanation.compiled(child, of_child)))  # pyright: ignore[reportArgumentType]
    fused.recompile()
    return fused.forward


def _places(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _static_places(module: torch.fx.GraphModule) -> set[Any]:
    """The placeholders of parameters and buffers which the graph leaves as they are."""
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None:
        return set()
    places = _places(module)
    return {
        places[i] for i in metadata.static_input_indices
        if i < len(places) and not (i < len(metadata.input_info) and metadata.input_info[i].mutates_data)
    }  # fmt: skip


class _Module(torch.nn.Module):
    """A compiled part as a submodule."""

    def __init__(self, compiled: CompiledGraph) -> None:
        super().__init__()
        self._compiled = compiled

    def forward(self, *args: Any) -> Any:
        return self._compiled(*args)


@cached_results()
def _warn_of_gradients() -> None:
    """Warns once that torch runs what needs gradients."""
    warnings.warn(
        'torch.compile(backend="max") compiles for inference: gradients are needed here, so torch runs this; '
        "use torch.no_grad()",
        stacklevel=3,
    )


def max_backend(
    module: torch.fx.GraphModule, inputs: Sequence[Any], explanation: Explanation | None = None
) -> Callable[..., Any]:
    """The backend of ``torch.compile(model, backend="max")``.

    It compiles for inference. Where gradients are needed the graph runs in torch, with a warning, once; so does a graph
    that cannot be compiled, with a warning that says why, and so do ops that have no function. Parameters and buffers
    are prepared once, and again when torch has changed them in place.

    Args:
        module: The graph.
        inputs: Its example inputs.
        explanation: Gets what is taken.

    Returns:
        What runs the graph.
    """
    explanation = Explanation() if explanation is None else explanation
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in inputs):
        _warn_of_gradients()
        explanation.left.append(("graph", "", "gradients are needed"))
        return module.forward
    compile_ = partial(_compile_module, explanation=explanation)
    with torch.no_grad():
        return aot_autograd(fw_compiler=compile_, decompositions=decompositions())(module, inputs)


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
        # compiled once more, now by this backend
        torch.compile(model, backend=partial(max_backend, explanation=found))(*args, **kwargs)
    return found


if "max" not in list_backends(()):
    # an installed package has it as an entry point
    register_backend(max_backend, name="max")
