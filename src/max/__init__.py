"""Supremum: an open engine behind the MAX Python API.

Importing ``max`` loads nothing else; import the part you use: ``max.graph``, ``max.engine``, ``max.driver``, …
Modules that other versions of the API have elsewhere are found under those names too (`max._earlier`).
"""

from max import _absent, _earlier, _traceback
from max._version import __version__ as __version__

__getattr__ = _earlier.earlier_names(__name__)

_earlier.install()
_absent.install()
_traceback.install()
