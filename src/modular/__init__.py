"""The 2023 API of the engine (`modular.engine`); see `max` for today's."""
