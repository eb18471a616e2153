"""The paged KV cache: page tables without tensors (`page_manager.py`), and the tensors (`manager.py`)."""

from max._earlier import earlier_names

__getattr__ = earlier_names(__name__)
