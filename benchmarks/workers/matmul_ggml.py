"""Products with quantized weights in ggml, llama.cpp's library, through its C interface and the shared libraries of llama-cpp-python.

Weights lie where llama.cpp puts them: in the buffers that lay them out anew for the processor, where those take the encoding, else as they
are. Runs in its own environment (see `benchmarks.peers`).
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from typing import Any

import llama_cpp  # noqa: F401  (it loads the libraries)
import numpy as np

from benchmarks.runner import serve
from benchmarks.timing import median_time

# enum ggml_type
TYPES = {"Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
F32 = 0
USAGE_WEIGHTS = 1
PAGE = 4096
_state: dict[str, Any] = {}


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    found = getattr(library, name)
    found.restype, found.argtypes = result, arguments
    return found


class Library:
    """The functions of ggml that are called here. Structures are known by their addresses."""

    def __init__(self) -> None:
        # the libraries that llama_cpp has loaded, by their own names: others lie beside them that are the same
        base, cpu = ctypes.CDLL("libggml-base.so.0"), ctypes.CDLL("libggml-cpu.so.0")
        p = c_void_p
        # it tells of each tensor that it lays out
        self.quiet = ctypes.CFUNCTYPE(None, c_int, c_char_p, p)(lambda *_: None)
        _function(base, "ggml_log_set", None, p, p)(ctypes.cast(self.quiet, p), None)
        self.init = _function(base, "ggml_init", p, _InitParams)
        self.free = _function(base, "ggml_free", None, p)
        self.tensor_overhead = _function(base, "ggml_tensor_overhead", c_size_t)
        self.graph_overhead = _function(
            base, "ggml_graph_overhead_custom", c_size_t, c_size_t, c_bool
        )
        self.row_size = _function(base, "ggml_row_size", c_size_t, c_int, c_int64)
        self.matrix = _function(base, "ggml_new_tensor_2d", p, p, c_int, c_int64, c_int64)
        self.mul_mat = _function(base, "ggml_mul_mat", p, p, p, p)
        self.new_graph = _function(base, "ggml_new_graph_custom", p, p, c_size_t, c_bool)
        self.expand = _function(base, "ggml_build_forward_expand", None, p, p)
        self.alloc_all = _function(base, "ggml_backend_alloc_ctx_tensors_from_buft", p, p, p)
        self.buffer = _function(base, "ggml_backend_buft_alloc_buffer", p, p, c_size_t)
        self.free_buffer = _function(base, "ggml_backend_buffer_free", None, p)
        self.address = _function(base, "ggml_backend_buffer_get_base", p, p)
        self.set_usage = _function(base, "ggml_backend_buffer_set_usage", None, p, c_int)
        self.place = _function(base, "ggml_backend_tensor_alloc", c_int, p, p, p)
        self.set = _function(base, "ggml_backend_tensor_set", None, p, p, c_size_t, c_size_t)
        self.get = _function(base, "ggml_backend_tensor_get", None, p, p, c_size_t, c_size_t)
        self.supports = _function(base, "ggml_backend_dev_supports_op", c_bool, p, p)
        self.compute = _function(base, "ggml_backend_graph_compute", c_int, p, p)
        self.plain = _function(cpu, "ggml_backend_cpu_buffer_type", p)()
        self.backend = _function(cpu, "ggml_backend_cpu_init", p)()
        threads = _function(cpu, "ggml_backend_cpu_set_n_threads", None, p, c_int)
        threads(self.backend, len(os.sched_getaffinity(0)))
        registry = _function(cpu, "ggml_backend_cpu_reg", p)()
        self.device = _function(base, "ggml_backend_reg_dev_get", p, p, c_size_t)(registry, 0)
        find = _function(base, "ggml_backend_reg_get_proc_address", p, p, c_char_p)
        extra = find(registry, b"ggml_backend_dev_get_extra_bufts")
        self.repacking: list[int] = []
        if extra:
            types = ctypes.CFUNCTYPE(ctypes.POINTER(p), p)(extra)(self.device)
            while types[len(self.repacking)]:
                self.repacking.append(types[len(self.repacking)])

    def context(self, tensors: int, nodes: int = 0) -> int:
        """Memory for the descriptions of tensors, and of a graph of the given number of nodes."""
        size = (tensors + 8) * self.tensor_overhead()
        size += self.graph_overhead(nodes, False) if nodes else 0
        return self.init(_InitParams(size, None, True))


class Products:
    """The products of one x with some weights, in a graph."""

    def __init__(self, ggml: Library, m: int, n: int, k: int, dtype: str, copies: int) -> None:
        self.ggml, kind = ggml, TYPES[dtype]
        self.contexts = [ggml.context(copies), ggml.context(copies + 1, copies + 8)]
        weights = [ggml.matrix(self.contexts[0], kind, k, n) for _ in range(copies)]
        self.x = ggml.matrix(self.contexts[1], F32, k, m)
        results = [ggml.mul_mat(self.contexts[1], w, self.x) for w in weights]
        self.repacked = self._repacking(kind, k, n)
        held = ggml.alloc_all(self.contexts[0], self.repacked or ggml.plain)
        ggml.set_usage(held, USAGE_WEIGHTS)
        # the results take turns in one place, as in a model
        behind = -(-4 * m * k // PAGE) * PAGE
        scratch = ggml.buffer(ggml.plain, behind + 4 * m * n + PAGE)
        begin = -(-ggml.address(scratch) // PAGE) * PAGE
        ggml.place(scratch, self.x, begin)
        self.graph = ggml.new_graph(self.contexts[1], copies + 8, False)
        for result in results:
            ggml.place(scratch, result, begin + behind)
            ggml.expand(self.graph, result)
        self.buffers = [held, scratch]
        # small bytes keep the scales, which are halves, finite
        data = np.random.default_rng(0).integers(0, 60, (n, ggml.row_size(kind, k)), np.uint8)
        for w in weights:
            ggml.set(w, data.ctypes.data, 0, data.nbytes)
        x = np.random.default_rng(0).standard_normal((m, k), np.float32)
        ggml.set(self.x, x.ctypes.data, 0, x.nbytes)
        self.last, self.shape = results[-1], (m, n)

    def _repacking(self, kind: int, k: int, n: int) -> int | None:
        """The first buffer type that lays weights out anew and can multiply by such a one; None where none does."""
        ggml = self.ggml
        for one in ggml.repacking:
            trial, weights = ggml.context(2), ggml.context(1)
            x, w = ggml.matrix(trial, F32, k, 1), ggml.matrix(weights, kind, k, n)
            held = ggml.alloc_all(weights, one)
            fits = bool(held) and ggml.supports(ggml.device, ggml.mul_mat(trial, w, x))
            if held:
                ggml.free_buffer(held)
            ggml.free(weights)
            ggml.free(trial)
            if fits:
                return one
        return None

    def multiply(self) -> None:
        """All products."""
        code = self.ggml.compute(self.ggml.backend, self.graph)
        if code:
            raise RuntimeError(f"ggml_backend_graph_compute gave {code}")

    def result(self) -> np.ndarray:
        """What the last product gave."""
        made = np.empty(self.shape, np.float32)
        self.ggml.get(self.last, made.ctypes.data, 0, made.nbytes)
        return made

    def free(self) -> None:
        """Gives the memory back."""
        for buffer in self.buffers:
            self.ggml.free_buffer(buffer)
        for context in self.contexts:
            self.ggml.free(context)


def setup() -> dict[str, object]:
    _state["ggml"] = Library()
    return {}


def run(
    m: int, n: int, k: int, dtype: str, copies: int, seconds: float, epilogue: bool = False
) -> dict[str, float]:
    """Seconds for a product; there is no epilogue."""
    if epilogue:
        raise NotImplementedError("no epilogue")
    key = (m, n, k, dtype, copies)
    if _state.get("key") != key:
        if "products" in _state:
            _state["products"].free()
        _state["products"] = Products(_state["ggml"], m, n, k, dtype, copies)
        _state["key"] = key
    return {"seconds": median_time(_state["products"].multiply, seconds, 3) / copies}


if __name__ == "__main__":
    serve({"setup": setup, "run": run})
