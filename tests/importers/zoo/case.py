"""A model with inputs, and what the comparison found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from max.engine import InferenceSession
from max.importers.errors import UnsupportedOpsError
from max.torch import from_exported

__all__ = ["Built", "Outcome", "compared", "flat", "randomized"]


@dataclass
class Built:
    """A model that is ready to be called.

    Attributes:
        model: The model, whose results are tensors in tuples, lists and mappings.
        args: Its arguments.
        kwargs: Its arguments by name.
        ranked: Whether rows of the results are ordered by a score: rows whose scores differ by their rounding may be in
            any order.
    """

    model: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    ranked: bool = False


@dataclass
class Outcome:
    """What a comparison found.

    Attributes:
        status: "whole": all of it is one graph with torch's results; "wrong", "refused" (the importer), "error"; or
            "torch": torch itself cannot build, run or export the model, or its float32 differs from its float64 by
            more than the tolerance.
        note: The largest difference as a part of the largest result, or the reason.
    """

    status: str
    note: str = ""
    error: float | None = None


def randomized(model: torch.nn.Module) -> torch.nn.Module:
    """Weights that are all zero, and statistics of norms, at random, so that the results depend on all layers."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.normal_(0, 0.05)
        for module in model.modules():
            if (
                isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
                and module.track_running_stats
            ):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
    return model.eval()


def flat(value: Any) -> list[torch.Tensor]:
    """The tensors of a result, in torch's order."""
    leaves, _ = torch.utils._pytree.tree_flatten(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


class _Flat(torch.nn.Module):
    """A model whose results are a tuple of tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(flat(self.model(*args, **kwargs)))


def compared(build: Callable[[], Built], runs: bool = True, rtol: float = 1e-3) -> Outcome:
    """Exports and imports a model, and compares its results with torch's.

    Args:
        build: Makes the model.
        runs: Whether the graph is compiled and run.
        rtol: The largest difference, as a part of the largest result.
    """
    torch.manual_seed(0)
    with torch.no_grad():
        try:
            built = build()
            model = _Flat(built.model).eval()
            kwargs = dict(built.kwargs or {})
            expected = model(*built.args, **kwargs)
            program = torch.export.export(model, built.args, kwargs, strict=False)
        except Exception as error:
            return Outcome("torch", _line(error))
        try:
            graph = from_exported(program)
        except UnsupportedOpsError as error:
            ops = sorted({f"{p.op}: {p.reason[:80]}" for p in error.problems})
            return Outcome("refused", "; ".join(ops)[:400])
        except Exception as error:
            return Outcome("refused", _line(error))
        if not runs:
            return Outcome("imported")
        try:
            inputs = [t.numpy() for t in flat((built.args, kwargs))]
            results = InferenceSession().load(graph).execute(*inputs)
            arrays = [r.to_numpy() for r in results]
            judged = _judged(_ordered(arrays, expected) if built.ranked else arrays, expected, rtol)
            if judged.status == "wrong" and (own := _own_error(model, built, expected)) > rtol:
                return Outcome("torch", f"its float32 differs from its float64 by {own:.1e}")
            return judged
        except Exception as error:
            return Outcome("error", _line(error))


def _own_error(model: torch.nn.Module, built: Built, expected: tuple[torch.Tensor, ...]) -> float:
    """How far torch's results in float32 are from its own in float64; 0 where it cannot compute them.

    Random weights of deep models may amplify roundings until no two ways to add numbers agree.
    """

    def widened(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.double() if is_float else value

    args, kwargs = torch.utils._pytree.tree_map(widened, (built.args, dict(built.kwargs or {})))
    try:
        exact = model.double()(*args, **kwargs)
    except Exception:
        return 0.0
    return _judged([t.numpy() for t in expected], exact, 0.0).error or 0.0


def _ordered(results: list[Any], expected: tuple[torch.Tensor, ...]) -> list[Any]:
    """The results with their rows in the order of the expected ones: each row is the nearest that is left."""
    if [r.shape for r in results] != [tuple(t.shape) for t in expected]:
        return results
    small = [i for i, result in enumerate(results) if result.ndim <= 2]
    got, want = (
        np.concatenate([np.asarray(a[i], np.float64).reshape(len(a[i]), -1) for i in small], 1)
        for a in (results, [t.numpy() for t in expected])
    )
    free = np.ones(len(got), bool)
    order: list[int] = []
    for row in want:
        distance = np.where(free, np.abs(got - row).max(1), np.inf)
        order.append(int(distance.argmin()))
        free[order[-1]] = False
    return [result[order] for result in results]


def _judged(results: list[Any], expected: tuple[torch.Tensor, ...], rtol: float) -> Outcome:
    if len(results) != len(expected):
        return Outcome("wrong", f"{len(results)} results, expected {len(expected)}")
    worst = 0.0
    for got, want in zip(results, expected, strict=True):
        want = want.to(torch.float64).numpy()
        got = np.asarray(got).astype(np.float64)
        if got.shape != want.shape:
            return Outcome("wrong", f"the shape is {got.shape}, expected {want.shape}")
        if not want.size:
            continue
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        scale = np.abs(want[np.isfinite(want)]).max(initial=0) or 1.0
        with np.errstate(invalid="ignore"):
            difference = np.where(same, 0, np.abs(got - want)) / scale
        found = float(difference.max())
        worst = found if found != found else max(worst, found)
    return Outcome("whole" if worst <= rtol else "wrong", f"{worst:.1e}", worst)


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]
