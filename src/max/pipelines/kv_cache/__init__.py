"""The paged KV cache: page tables (`page_manager.py`, without tensors), and the tensors (`manager.py`)."""

from max._names import lazy_names

__getattr__ = lazy_names(__name__)
