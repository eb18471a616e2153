"""Prints the public names of MAX's modules as JSON; runs under MAX's Python.

``PATH/TO/MAX/python tests/differential/names.py > tests/differential/facts/26.7/names.json``
"""

from __future__ import annotations

import importlib
import json
import types

MODULES = """
max.driver max.dtype max.engine max.experimental max.experimental.functional max.experimental.nn
max.experimental.random max.experimental.tensor max.experimental.torch max.graph max.graph.ops max.graph.quantization
max.graph.weights max.nn max.nn.activation max.nn.attention max.nn.comm max.nn.conv max.nn.embedding max.nn.hooks
max.nn.kernels max.nn.kv_cache max.nn.layer max.nn.linear max.nn.moe max.nn.norm max.nn.quant_config
max.nn.rotary_embedding max.nn.sampling max.nn.transformer max.pipelines max.pipelines.context max.pipelines.kv_cache
max.pipelines.lib max.pipelines.lib.config max.pipelines.lib.interfaces max.pipelines.modeling.types
max.pipelines.request max.pipelines.weights
""".split()


def public_names(module: types.ModuleType) -> list[str]:
    """What a module exports: ``__all__``; without it, what it and modules below it define."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return sorted(name for name in listed if not name.startswith("_"))
    names: list[str] = []
    for name, value in vars(module).items():
        home = getattr(value, "__module__", None)
        own = isinstance(home, str) and home.startswith(module.__name__)
        if own and not name.startswith("_") and not isinstance(value, types.ModuleType):
            names.append(name)
    return sorted(names)


if __name__ == "__main__":
    found = {module: public_names(importlib.import_module(module)) for module in MODULES}
    print(json.dumps(found, indent=1))
