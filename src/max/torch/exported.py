"""Programs of torch.export as graphs."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from max.graph import Graph
from max.importers.build import build_graph
from max.importers.torch.decompositions import decompositions
from max.importers.torch.importer import TorchFramework, read_program

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["from_exported"]


def from_exported(program: ExportedProgram, name: str = "main") -> Graph:
    """A program of `torch.export` as a graph.

    The graph's inputs are the tensors that the program takes, in their order, and its outputs those that it returns;
    outputs that are None are left out. Dynamic dimensions are symbols, so that one compiled model serves all sizes.
    Parameters and buffers share the memory of the program. The new contents of buffers and inputs that the program
    changes are outputs behind the others, and such buffers inputs behind the others.

    ::

        program = torch.export.export(model.eval(), (x,))
        model = max.engine.InferenceSession().load(from_exported(program))

    Args:
        program: The program.
        name: The name of the graph.

    Returns:
        The graph, to be loaded with `max.engine.InferenceSession.load`, or saved.

    Raises:
        UnsupportedOpsError: Ops cannot be staged; it lists all of them, with their lines of the source program.
        ImportFailure: An input or output is no tensor of the CPU.
    """
    with warnings.catch_warnings():
        # torch's own use of what it deprecates
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        decomposed: Any = program.run_decompositions(decompositions())
    return build_graph(read_program(decomposed, name), TorchFramework())
