"""Reads adapters in the layout of PEFT: a folder with adapter_config.json and adapter_model.safetensors.

The files are untrusted: sizes are checked before values are read, and what cannot be applied is an error that names the
tensor. The modules follow from the tensors of the file; ``target_modules``, ``layers_to_transform`` and
``exclude_modules`` say where a training run put them, and are not needed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from max._dataclass import dataclass
from max.driver import Tensor
from max.graph.weights import WeightsFileError, load_weights
from max.pipelines.adapters.adapter import (
    MAX_TENSORS,
    Adapter,
    AdapterError,
    Array,
    LowRank,
    check_finite,
    digest_of,
    regular_file,
)
from max.pipelines.adapters.experts import experts_matrices, parameter_of

__all__ = ["CONFIG", "read_peft"]

CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_MAX_CONFIG_BYTES = 1 << 20
_PREFIX = "base_model.model."
_KINDS = {
    "lora_A.weight": "a", "lora_B.weight": "b", "lora_embedding_A": "table_a", "lora_embedding_B": "table_b",
    "lora_magnitude_vector": "magnitude", "lora_magnitude_vector.weight": "magnitude", "lora_B.bias": "bias",
}  # fmt: skip
"""The ends of tensors' names."""
_UNSUPPORTED = (
    "layer_replication", "alora_invocation_tokens", "arrow_config", "use_qalora", "trainable_token_indices",
    "use_bdlora",
)  # fmt: skip
"""Options whose adapters compute something else."""
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
"""The values of ``init_lora_weights`` with which PEFT leaves the weights of the base as they are."""
# text, classes, groups and alternatives; repetitions only of single characters, so that matching takes linear time
_PATTERN = re.compile(r"[\w.\-|()^$\[\]\\:?*+]{1,256}")
_REPEATED_GROUP = re.compile(r"\)[*+?{]|[*+?][*+]")
_MOST_REPEATS = 2
_EXPERTS = ".experts"
"""The end of the names of modules whose parameters have the weights of all experts."""
_MOST_PATTERNS = 4096


@dataclass(frozen=True)
class _Config:
    """The values of adapter_config.json that the matrices need."""

    rank: int
    alpha: float
    alphas: tuple[tuple[str, float], ...]
    ranks: tuple[tuple[str, float], ...]
    root: bool
    dora: bool
    base: str
    parameters: tuple[str, ...]

    def scale(self, module: str, rank: int) -> float:
        """The factor of a module's product."""
        alpha = next((value for key, value in self.alphas if _matches(key, module)), self.alpha)
        # rsLoRA: https://arxiv.org/abs/2312.03732
        return alpha / math.sqrt(rank) if self.root else alpha / rank

    def rank_of(self, module: str) -> int:
        """The rank that the file states for a module or parameter."""
        return int(next((n for key, n in self.ranks if _matches(key, module)), self.rank))


def read_peft(folder: Path, max_rank: int) -> Adapter:
    """Reads an adapter.

    Args:
        folder: The folder.
        max_rank: The bound of the rank.

    Raises:
        AdapterError: The files are missing or damaged, or are no LoRA adapter.
    """
    config_path = regular_file(folder / CONFIG)
    path = next((folder / name for name in _WEIGHTS if (folder / name).exists()), None)
    if path is None:
        raise AdapterError(f"{folder} has no {' or '.join(_WEIGHTS)}")
    regular_file(path)
    config = _read_config(config_path)
    try:
        tensors = {name: weight for name, weight in load_weights([path]).items()}
    except (WeightsFileError, ValueError, OSError) as error:
        raise AdapterError(f"the adapter's weights cannot be read: {error}") from error
    if not 0 < len(tensors) <= MAX_TENSORS:
        raise AdapterError(f"{path} has {len(tensors)} tensors, expected 1 to {MAX_TENSORS}")
    # by module, and the number of wrappers of a parameter that are around the one of the tensors
    parts: dict[tuple[str, int], dict[str, tuple[str, Array]]] = {}
    saved: dict[str, Array] = {}
    for name, weight in tensors.items():
        try:
            data = weight.data()
        except (WeightsFileError, ValueError) as error:
            raise AdapterError(f"the adapter's weights cannot be read: {error}") from error
        if not data.dtype.is_float() or data.quantization_encoding is not None:
            raise AdapterError(f"the tensor {name!r} is {data.dtype.name}, expected floats")
        values: Array = Tensor.from_dlpack(data.data).to_numpy()
        module, kind = _module_of(name)
        depth = 0
        if config.parameters and module.endswith(_EXPERTS):
            depth = name.split(".").count("base_layer")
        key = module, depth
        if kind is None:
            saved[module] = values
        elif kind in parts.setdefault(key, {}):
            raise AdapterError(f"the tensor {name!r} is there twice, by another name")
        else:
            parts[key][kind] = (name, values)
    modules: dict[str, LowRank] = {}
    for (module, depth), own in parts.items():
        if config.parameters and module.endswith(_EXPERTS):
            levels = sum(other == module for other, _ in parts)
            module = parameter_of(module, depth, levels, config.parameters)
            modules[module] = _of_experts(module, own, config, max_rank)
        else:
            modules[module] = _low_rank(module, own, config, max_rank)
    for name, values in saved.items():
        check_finite(name, values)
    digest = digest_of([config_path, path])
    return Adapter(folder, digest, modules, saved, base=config.base)


def _read_config(path: Path) -> _Config:
    """Reads adapter_config.json."""
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise AdapterError(f"{path} is larger than {_MAX_CONFIG_BYTES} bytes")
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{path} is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise AdapterError(f"{path} holds no JSON object")
    kind = values.get("peft_type", "LORA")
    if kind != "LORA":
        raise AdapterError(f"{path}: peft_type is {str(kind)[:40]!r}; only LORA adapters run")
    for key in _UNSUPPORTED:
        if values.get(key):
            raise AdapterError(f"{path}: {key} is set; such adapters do not run")
    start = values.get("init_lora_weights")
    if not any(start == plain for plain in _PLAIN_STARTS):
        raise AdapterError(
            f"{path}: init_lora_weights is {str(start)[:40]!r}: PEFT changes the base's weights before it adds such an "
            "adapter",
            "Convert it to a plain adapter: save_pretrained(…, path_initial_model_for_weight_conversion=…) of PEFT.",
        )
    rank = values.get("r", 8)
    if type(rank) is not int or rank < 1:
        raise AdapterError(f"{path}: r is {str(rank)[:40]}, expected an integer of 1 or more")
    alpha = _number(path, "lora_alpha", values.get("lora_alpha", 8))
    alphas = _patterns(path, "alpha_pattern", values)
    ranks = _patterns(path, "rank_pattern", values)
    parameters = values.get("target_parameters") or []
    if (
        not isinstance(parameters, list)
        or len(parameters) > _MOST_PATTERNS
        or any(not isinstance(name, str) for name in parameters)
    ):
        raise AdapterError(
            f"{path}: target_parameters is no list of at most {_MOST_PATTERNS} names"
        )
    return _Config(
        rank,
        alpha,
        tuple(alphas.items()),
        tuple(ranks.items()),
        bool(values.get("use_rslora")),
        bool(values.get("use_dora")),
        str(values.get("base_model_name_or_path") or "")[:256],
        tuple(parameters),
    )


def _patterns(path: Path, key: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers by patterns of modules' names; patterns whose matching could take long are refused."""
    table = values.get(key) or {}
    if not isinstance(table, dict) or len(table) > _MOST_PATTERNS:
        raise AdapterError(f"{path}: {key} is no object of at most {_MOST_PATTERNS} numbers")
    for pattern in table:
        repeats = len(re.findall(r"[*+?]", pattern))
        if (
            not _PATTERN.fullmatch(pattern)
            or repeats > _MOST_REPEATS
            or _REPEATED_GROUP.search(pattern)
        ):
            raise AdapterError(
                f"{path}: {key} has the pattern {pattern[:80]!r}, which is too complex"
            )
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise AdapterError(
                f"{path}: {key} has the pattern {pattern[:80]!r}: {error}"
            ) from error
    return {pattern: _number(path, key, number) for pattern, number in table.items()}


def _matches(pattern: str, module: str) -> bool:
    """Whether a pattern names a module, or the end of its name after a dot."""
    return re.match(rf"(?:.*\.)?(?:{pattern})$", module) is not None


def _number(path: Path, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise AdapterError(f"{path}: {key} is {str(value)[:40]}, expected a number")
    return float(value)


def _module_of(name: str) -> tuple[str, str | None]:
    """The module of a tensor and its part; for a whole weight its own name, and None."""
    plain = ".".join(part for part in name.removeprefix(_PREFIX).split(".") if part != "base_layer")
    # of an adapter that was not renamed when it was saved
    for end, kind in _KINDS.items():
        first, _, last = end.partition(".")
        for known in (f".{end}", f".{first}.default{'.' + last if last else ''}"):
            if plain.endswith(known):
                return plain.removesuffix(known), kind
    if ".lora_" in plain:
        raise AdapterError(f"the tensor {name!r} is of no known kind of adapter")
    return plain.replace(".modules_to_save.default.", ".").replace(".modules_to_save.", "."), None


def _low_rank(
    module: str, parts: Mapping[str, tuple[str, Array]], config: _Config, max_rank: int
) -> LowRank:
    """Checks the tensors of a module, and joins them."""
    is_table = "table_a" in parts or "table_b" in parts
    keys = ("table_a", "table_b") if is_table else ("a", "b")
    if not parts.keys() >= set(keys):
        name = next(iter(parts.values()))[0]
        raise AdapterError(f"the tensor {name!r} is alone: the file lacks A or B of {module!r}")
    (name, a), (name_b, b) = (parts[key] for key in keys)
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or 0 in (*a.shape, *b.shape):
        raise AdapterError(
            f"the tensors {name!r} and {name_b!r} are {list(a.shape)} and {list(b.shape)}; expected [rank, inputs] and "
            "[outputs, rank]"
        )
    rank = a.shape[0]
    _check_rank(name, rank, max_rank)
    if rank != config.rank and not config.ranks:
        raise AdapterError(
            f"the tensor {name!r} has rank {rank}, and {CONFIG} states {config.rank}"
        )
    vectors: dict[str, Array | None] = {"magnitude": None, "bias": None}
    for kind in vectors:
        if kind not in parts:
            continue
        own, values = parts[kind]
        if values.size != b.shape[0]:
            raise AdapterError(
                f"the tensor {own!r} is {list(values.shape)}, expected {b.shape[0]} elements"
            )
        check_finite(own, values)
        vectors[kind] = values.reshape(-1)
    if config.dora and vectors["magnitude"] is None:
        raise AdapterError(f"the file lacks the magnitudes (DoRA) of {module!r}, see {name!r}")
    check_finite(name, a)
    check_finite(name_b, b)
    return LowRank(name, a, b, config.scale(module, rank), is_table, **vectors)


def _of_experts(
    parameter: str, parts: Mapping[str, tuple[str, Array]], config: _Config, max_rank: int
) -> LowRank:
    """Checks the tensors of a parameter that holds all experts of a layer, and joins them."""
    if parts.keys() != {"a", "b"} or config.dora:
        name = next(iter(parts.values()))[0]
        raise AdapterError(
            f"the tensor {name!r}: a parameter of experts has A and B, no DoRA and no bias"
        )
    (name, a), (name_b, b) = parts["a"], parts["b"]
    rank = config.rank_of(parameter)
    if rank < 1:
        raise AdapterError(f"rank_pattern states the rank {rank} for {parameter!r}")
    _check_rank(name, rank, max_rank)
    check_finite(name, a)
    check_finite(name_b, b)
    of_experts = experts_matrices(a, b, rank, (name, name_b))
    return LowRank(name, *of_experts, config.scale(parameter, rank))


def _check_rank(name: str, rank: int, max_rank: int) -> None:
    if rank > max_rank:
        raise AdapterError(
            f"the tensor {name!r} has rank {rank}, above {max_rank}",
            "Give a greater --max-lora-rank.",
        )
