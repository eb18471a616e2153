"""Supremum: an open engine behind the MAX Python API.

Importing ``max`` loads nothing else; import the part you use: ``max.graph``, ``max.engine``, ``max.driver``, …
Names and modules of other versions of the API lead to the objects here (`max._compat`).
"""

from max import _lazy, _names, _traceback
from max._version import __version__ as __version__

__getattr__ = _names.lazy_names(__name__, submodules=True)

_FILES_AS_PACKAGES = {
    f"max.{package}.{name}"
    for package, names in {
        "experimental": "functional",
        "nn": "comm hooks layer lora moe norm sampling",
        "pipelines.architectures": "gemma3 granite mistral olmo olmo2 phi3 qwen2 qwen3",
        "pipelines.lib": "config interfaces",
    }.items()
    for name in names.split()
}
"""Modules that are files here and packages in other versions."""

_names.install(_lazy.lazy_module("max._compat.finder"), _FILES_AS_PACKAGES)
_traceback.install()
