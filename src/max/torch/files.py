"""Files of PyTorch as graphs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from max.engine import TorchInputSpec
from max.graph import Graph
from max.importers.errors import ImportFailure, ModelFileError
from max.importers.torch.archive import kind_of, load_program, load_script
from max.importers.torch.ops.shape import is_known
from max.torch.exported import from_exported
from max.torch.scripted import from_script

__all__ = ["from_file", "input_names"]


def from_file(
    path: str | os.PathLike[str], input_specs: Sequence[TorchInputSpec | Any] | None = None
) -> Graph:
    """A file of `torch.export.save` or `torch.jit.save` as a graph.

    Args:
        path: The file.
        input_specs: The types of the inputs, which TorchScript does not declare.

    Raises:
        ModelFileError: The file holds something else, or is damaged.
        ImportFailure: The model cannot be a graph.
    """
    file = Path(path)
    kind = kind_of(file)
    if kind == "pickle":
        raise ModelFileError(
            f"{file} holds pickled tensors or modules (torch.save), which are no program: export the model with "
            "torch.export.save(torch.export.export(model, inputs), path) or torch.jit.script(model).save(path)"
        )
    if kind == "script":
        if input_specs is None:
            raise ImportFailure(
                f"{file} is a TorchScript module, which does not declare its inputs: give "
                "input_specs=[TorchInputSpec(shape, dtype), ...]"
            )
        return from_script(file, input_specs, file.stem or "main")
    graph = from_exported(load_program(file), file.stem or "main")
    _check_specs(file, graph, input_specs)
    return graph


def input_names(path: str | os.PathLike[str], count: int) -> list[str] | None:
    """The names of a file's inputs: the arguments of its method; None where they are not as many as `count`."""
    file = Path(path)
    if kind_of(file) == "script":
        method = load_script(file)._c._get_method("forward")
        names = [a.name for a in method.schema.arguments[1:] if "Tensor" in str(a.type)]
    else:
        names = [str(name) for name in load_program(file).graph_signature.user_inputs]
    return names if len(names) == count else None


def _check_specs(file: Path, graph: Graph, specs: Sequence[TorchInputSpec] | None) -> None:
    """Raises an error if the program has other inputs than the specs say."""
    for number, (spec, value) in enumerate(zip(specs or (), graph.inputs, strict=False)):
        declared = list(value.tensor.shape)
        given = spec.shape
        if given is not None and (
            len(given) != len(declared)
            or any(
                isinstance(g, int) and d != g and is_known(d)
                for g, d in zip(given, declared, strict=True)
            )
        ):
            raise ImportFailure(
                f"{file}: input {number} has the shape {declared}, not {given}; export the program with other shapes"
            )
