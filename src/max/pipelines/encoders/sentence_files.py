"""The files of sentence-transformers beside a model: pooling, dense layers, prompts, the longest text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from max.graph.weights import WeightData, load_weights
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.checkpoints.hub import HuggingFaceRepo
from max.pipelines.checkpoints.model_files import read_json, read_json_objects
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.encoders.encoder_config import LARGEST_SIZE
from max.pipelines.encoders.heads import POOLINGS, SentenceStep

__all__ = ["SentenceFiles", "read_scores_activation", "read_sentence_files"]

MODULES = "modules.json"
_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
_ACTIVATIONS = {"Identity": None, "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}
"""Classes of torch, and names in `max.nn.linear.ACTIVATIONS`."""
_REMEDY = "Correct the file, or download the model's files again."


@dataclass(frozen=True)
class SentenceFiles:
    """What sentence-transformers' files say of a model.

    Args:
        steps: The modules after the encoder. Without files: the mean of the tokens' vectors.
        weights: The weights of the modules, by the names of `SentenceHead`.
        max_length: The longest text in tokens; longer ones are cut off. None: the longest that the model supports.
        prompts: Texts that are put before a text, by name.
        default_prompt: The name of the prompt that is used where none is given.
        pools_prompts: Whether the tokens of a prompt are pooled, too.
    """

    steps: tuple[SentenceStep, ...] = (SentenceStep("pooling", ("mean",)),)
    weights: Mapping[str, WeightData] = field(default_factory=dict[str, WeightData])
    max_length: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    default_prompt: str | None = None
    pools_prompts: bool = True


def read_sentence_files(repo: HuggingFaceRepo) -> SentenceFiles:
    """Reads modules.json and the files that it names.

    Args:
        repo: The model.

    Raises:
        ModelFilesError: A file is broken, or has a module that this engine does not run.
    """
    # without these files sentence-transformers takes the mean of the tokens
    files = SentenceFiles()
    path = _file(repo, MODULES)
    if path is not None:
        files = _with_modules(files, repo, path)
    path = _file(repo, "sentence_bert_config.json")
    if path is not None:
        keys = ConfigKeys(read_json(path), file=str(path))
        files = replace(files, max_length=keys.integer("max_seq_length", 1, LARGEST_SIZE, None))
    path = _file(repo, "config_sentence_transformers.json")
    if path is not None:
        keys = ConfigKeys(read_json(path), file=str(path))
        prompts = _prompts(keys)
        default = keys.value("default_prompt_name")
        if default is not None and default not in prompts:
            raise keys.error("default_prompt_name", f"one of {', '.join(prompts)}")
        files = replace(files, prompts=prompts, default_prompt=default)
    return files


def read_scores_activation(keys: ConfigKeys, outputs: int) -> str | None:
    """The activation of a ranker's scores: what config.json names, else a sigmoid for a single score.

    Args:
        keys: The keys of config.json.
        outputs: The number of scores.

    Raises:
        ModelFilesError: The activation is unknown.
    """
    section = keys.object("sentence_transformers")
    named = None if section is None else section.value("activation_fn")
    named = keys.value("sbert_ce_default_activation_function") if named is None else named
    if named is None:
        return "sigmoid" if outputs == 1 else None
    name = str(named).rpartition(".")[2]
    activations = {**_ACTIVATIONS, "Sigmoid": "sigmoid"}
    if name not in activations:
        key = "sbert_ce_default_activation_function"
        raise (keys if section is None else section).error(
            key if section is None else "activation_fn", f"one of torch's {', '.join(activations)}"
        )
    return activations[name]


def _file(repo: HuggingFaceRepo, name: str) -> Path | None:
    return repo.file(name) if repo.file_exists(name) else None


def _prompts(keys: ConfigKeys) -> dict[str, str]:
    """The prompts by name."""
    prompts = keys.value("prompts")
    if prompts is None:
        return {}
    if not isinstance(prompts, dict) or not all(isinstance(x, str) for x in prompts.values()):
        raise keys.error("prompts", "an object of texts")
    return prompts


def _with_modules(files: SentenceFiles, repo: HuggingFaceRepo, modules: Path) -> SentenceFiles:
    """The files with the modules of a modules.json."""
    steps: list[SentenceStep] = []
    weights: dict[str, WeightData] = {}
    for number, entry in enumerate(read_json_objects(modules)):
        keys = ConfigKeys(entry, f"entry {number}", str(modules))
        kind, folder = str(keys.value("type")).rpartition(".")[2], keys.value("path")
        if not isinstance(folder, str):
            raise keys.error("path", "the name of a folder")
        # the encoder itself, and what does nothing outside of training
        if kind in ("Transformer", "Dropout"):
            continue
        if kind == "Normalize":
            steps.append(SentenceStep("normalize"))
            continue
        if kind not in ("Pooling", "Dense", "LayerNorm"):
            raise keys.error("type", "Transformer, Pooling, Dense, LayerNorm, Normalize or Dropout")
        path = _file(repo, f"{folder}/config.json")
        if path is None:
            raise ModelFilesError(f"{repo.repo_id} lacks {folder}/config.json", _REMEDY)
        config = ConfigKeys(read_json(path), file=str(path))
        if kind == "Pooling":
            steps.append(_pooling(config))
            files = replace(files, pools_prompts=config.flag("include_prompt", True))
            continue
        steps.append(_dense(config) if kind == "Dense" else _norm(config))
        # `SentenceHead.steps` has only the layers with weights
        count = sum(step.kind in ("dense", "norm") for step in steps) - 1
        prefix = "linear." if kind == "Dense" else "norm."
        for name, value in _weights(repo, folder).items():
            weights[f"steps.{count}.{name.removeprefix(prefix)}"] = value
    if not any(step.kind == "pooling" for step in steps):
        raise ModelFilesError(
            f"{modules} has no module Pooling; expected one after Transformer", _REMEDY
        )
    return replace(files, steps=tuple(steps), weights=weights)


def _pooling(config: ConfigKeys) -> SentenceStep:
    """The pooling step, with its poolings in the order of `POOLINGS`."""
    named = config.value("pooling_mode")
    if named is not None:
        poolings = named.split("+") if isinstance(named, str) else named
        if not isinstance(poolings, list) or not {*poolings} <= {*POOLINGS}:
            raise config.error("pooling_mode", f"one or more of {', '.join(POOLINGS)}")
    else:
        poolings = [name for name, flag in _FLAGS.items() if config.flag(flag)]
        if not poolings:
            raise config.error(
                "pooling_mode_mean_tokens", "true, or another pooling_mode_… that is"
            )
    return SentenceStep("pooling", tuple(name for name in POOLINGS if name in poolings))


def _dense(config: ConfigKeys) -> SentenceStep:
    """The dense layer."""
    # the default of sentence-transformers
    name = str(config.value("activation_function") or "torch.nn.modules.activation.Tanh")
    name = name.rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise config.error("activation_function", f"one of torch's {', '.join(_ACTIVATIONS)}")
    return SentenceStep(
        "dense",
        inputs=config.integer("in_features", 1, LARGEST_SIZE),
        outputs=config.integer("out_features", 1, LARGEST_SIZE),
        bias=config.flag("bias", True),
        activation=_ACTIVATIONS[name],
    )


def _norm(config: ConfigKeys) -> SentenceStep:
    return SentenceStep("norm", inputs=config.integer("dimension", 1, LARGEST_SIZE))


def _weights(repo: HuggingFaceRepo, folder: str) -> dict[str, WeightData]:
    for name in ("model.safetensors", "pytorch_model.bin"):
        path = _file(repo, f"{folder}/{name}")
        if path is not None:
            return {key: value.data() for key, value in load_weights([path]).items()}
    raise ModelFilesError(f"{repo.repo_id} lacks {folder}/model.safetensors", _REMEDY)
