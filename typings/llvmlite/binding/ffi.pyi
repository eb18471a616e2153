from typing import Any

lib: Any
