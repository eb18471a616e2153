"""The 2023 API of the engine (`modular.engine`), which is absent; `max` says what does its work."""

import max as max  # an import of `modular.engine` tells of it
