"""Exported programs as source graphs, with the table of torch's ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from max.importers.node import Node
from max.importers.source import SourceGraph
from max.importers.torch import ops as _ops
from max.importers.torch.element_types import array_of
from max.importers.torch.reader import FxReader
from max.importers.torch.table import TABLE

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["TorchFramework", "read_program"]


class TorchFramework:
    """The ops of torch."""

    table = TABLE
    in_parts = "export the model with static shapes, or run it with torch.compile(backend='max')"

    def expand(self, node: Node) -> SourceGraph | None:
        """None: torch's own decompositions are applied before."""
        return None


def read_program(program: ExportedProgram, name: str) -> SourceGraph:
    """The source graph of a program whose ops are decomposed.

    Parameters, buffers and constants share the memory of the program. Buffers that the program changes are inputs
    behind the user's, and their new contents outputs behind the user's, as are inputs that it changes.
    """
    from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

    signature = program.graph_signature
    mutated = set(signature.buffers_to_mutate.values())
    bound: dict[str, Any] = {}
    state_inputs: list[str] = []
    for spec in signature.input_specs:
        if spec.kind is InputKind.USER_INPUT or not isinstance(spec.arg, TensorArgument):
            continue
        target = str(spec.target)
        if spec.kind is InputKind.BUFFER and target in mutated:
            state_inputs.append(spec.arg.name)
            continue
        # buffers that are not saved, and constants, are apart
        tensor: Any = program.state_dict.get(target)
        if tensor is None:
            tensor = program.constants[target]
        bound[spec.arg.name] = array_of(target, tensor)
    user: list[int] = []
    state: list[int] = []
    for index, output in enumerate(signature.output_specs):
        if output.kind is OutputKind.USER_OUTPUT:
            # a result that is always None has no place in the graph
            if getattr(output.arg, "value", 0) is not None:
                user.append(index)
        elif output.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION):
            state.append(index)
    reader = FxReader(program.graph, program.graph_module, bound)
    source = reader.read(name, [*user, *state])
    # a stable sort: the inputs keep their order, those of the state follow
    inputs = sorted(source.inputs, key=lambda entry: entry[0] in state_inputs)
    return SourceGraph(
        source.name, tuple(inputs), source.outputs, source.nodes, source.constants, source.file
    )


LOADED = _ops.__name__
"""Importing the package fills the table."""
