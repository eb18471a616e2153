"""torch's linear layer, timed; of int8 its product in 32 bits, and its dynamically quantized layer."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from benchmarks.runner import serve
from benchmarks.timing import median_time

_made: dict[tuple[int, int, int, str, int], tuple[torch.Tensor, list[Any]]] = {}
SCALED = "int8, scaled"


def setup() -> dict[str, object]:
    return {"threads": torch.get_num_threads()}


def _weight(n: int, k: int, dtype: str) -> Any:
    if dtype != SCALED:
        return _random(n, k, dtype)
    layer = torch.nn.Sequential(torch.nn.Linear(k, n, bias=False))
    with warnings.catch_warnings():
        # it is to move to a package of its own
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(layer, {torch.nn.Linear}, torch.qint8)[0]


def _random(rows: int, columns: int, dtype: str) -> torch.Tensor:
    if dtype == "int8":
        return torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    return torch.randn(rows, columns).to(getattr(torch, dtype))


def run(
    m: int, n: int, k: int, dtype: str, copies: int, seconds: float, epilogue: bool = False
) -> dict[str, float]:
    key = (m, n, k, dtype, copies)
    if key not in _made:
        _made.clear()
        _made[key] = (
            _random(m, k, "float32" if dtype == SCALED else dtype),
            [_weight(n, k, dtype) for _ in range(copies)],
        )
    x, weights = _made[key]

    def multiply() -> None:
        total = None
        for weight in weights:
            if dtype == "int8":
                made = torch._int_mm(x, weight.t())
            elif dtype == SCALED:
                made = weight(x)
            else:
                made = torch.nn.functional.linear(x, weight)
            if epilogue:
                torch.nn.functional.silu(made, inplace=True)
                total = made if total is None else total.add_(made)

    with torch.inference_mode():
        return {"seconds": median_time(multiply, seconds, 3) / copies}


if __name__ == "__main__":
    serve({"setup": setup, "run": run})
