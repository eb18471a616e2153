"""Reductions, scans, sorts and normalizations along axes."""

# first: that package shows softmax, so whichever of the two is imported first must load it
import max.graph.ops.elementwise as _elementwise  # noqa: F401  # pyright: ignore[reportUnusedImport]
