"""Supremum: an open engine behind the MAX Python API.

Importing ``max`` loads nothing else; import the part you use: ``max.graph``, ``max.engine``, ``max.driver``, …
"""

from max._version import __version__ as __version__
