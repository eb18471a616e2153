"""The paged KV cache: page tables (`page_manager.py`, without tensors), and the tensors (`manager.py`)."""

from max._earlier import earlier_names

__getattr__ = earlier_names(__name__)
