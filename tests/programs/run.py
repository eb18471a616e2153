"""Runs programs with the `max` of this environment: ``python -m tests.programs.run [--stage] arrays networks …``.

``--stage`` ends each program where it loads its first graph, for an environment that can build graphs and not run them.
"""

from __future__ import annotations

import importlib
import sys
import time


class Staged(BaseException):
    """Raised when a program reaches its first `load`."""


def main(modules: list[str]) -> None:
    if "--stage" in modules:
        from max.engine import InferenceSession

        def load(*args: object, **kwargs: object) -> None:
            raise Staged

        InferenceSession.load = load  # type: ignore[method-assign]
    for module in modules:
        if module.startswith("-"):
            continue
        for program in importlib.import_module(f"tests.programs.{module}").PROGRAMS:
            begin = time.perf_counter()
            try:
                program()
                said = "ok"
            except Staged:
                said = "staged"
            except Exception as error:
                said = f"{type(error).__name__}: {str(error)[:300]}"
            took = time.perf_counter() - begin
            print(f"{module}.{program.__name__}: {said} ({took:.1f} s)", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
