"""Causal language models of transformers, their cache among the inputs and outputs of the graph."""

from __future__ import annotations

import contextlib
import inspect
import io
import linecache
import logging
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from max.driver import Tensor
from max.engine import InferenceSession, Model
from max.graph import Graph
from max.importers.errors import ImportFailure, UnsupportedOpsError, error_line
from max.importers.torch.element_types import array_of
from max.torch.exported import from_exported

__all__ = ["CausalLM"]

logger = logging.getLogger("max.torch")

_CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
_TORCH = str(Path(torch.__file__).parent)


class CausalLM:
    """A causal language model of transformers, of any architecture that `torch.export` takes.

    The model is exported twice: for a prompt of any length, and for one token behind what the cache holds. Keys and
    values of `max_length` tokens, and the states of recurrent layers, are inputs and outputs of both graphs. Where
    torch cannot export the prompt with a dynamic length, its tokens run one by one.

    ::

        model = AutoModelForCausalLM.from_pretrained(folder)
        lm = CausalLM(model, max_length=512)
        logits = lm.forward([1, 17, 4])          # of the token behind the prompt
        logits = lm.forward([int(logits.to_numpy()[0].argmax())])

    Args:
        model: The model, on the CPU. It is put into evaluation mode, and its parameters need no gradient any more;
            the graphs share their memory.
        max_length: The most tokens that the cache holds; attention computes with all of them.
        session: Compiles and runs the graphs.

    Raises:
        ImportFailure: torch cannot export the model, which has data-dependent Python code or no cache, an op is
            missing in graphs (`UnsupportedOpsError`), or the graphs' logits are not those of the model without a cache.
    """

    def __init__(
        self, model: torch.nn.Module, max_length: int, session: InferenceSession | None = None
    ) -> None:
        if max_length < 2:
            raise ValueError(f"CausalLM: max_length is {max_length}, expected 2 or more")
        self.max_length = max_length
        session = InferenceSession() if session is None else session
        model.train(False).requires_grad_(False)
        with torch.no_grad():
            step, graph = _export_step(model, max_length)
            self._empty = [Tensor.from_numpy(array_of("cache", state)) for state in step.empty]
            self._step = session.load(graph)
            self._prompt = None
            try:
                _, graph = _export_step(model, max_length, is_prompt=True, has_mask=step.has_mask)
                self._prompt = session.load(graph)
            except ImportFailure as error:
                logger.info("the tokens of prompts run one by one: %s", error)
            self.reset()
            self._check(model)
        self.reset()

    def _check(self, model: torch.nn.Module) -> None:
        """Raises ImportFailure if the graphs compute other logits than the model does without a cache.

        Some models do not mask the part of the cache that holds no tokens yet.
        """
        prompt = list(range(1, min(self.max_length, 5)))
        expected = model(torch.tensor([prompt]), use_cache=False).logits[:, -1].to(torch.float32)
        expected = array_of("logits", expected)
        # the last token alone, as it must find the others in the cache
        self.forward(prompt[:-1])
        found = self.forward(prompt[-1:]).to_numpy()
        scale = np.abs(expected).max(initial=1e-6)
        # bfloat16 has 8 bits; what is masked wrongly differs by the scale itself
        if not np.abs(found - expected).max(initial=0) <= 0.1 * scale:
            raise ImportFailure(
                f"{type(model).__name__} computes other logits with a static cache than without: it is no causal "
                "model, or does not mask the part of the cache that is empty"
            )

    @property
    def length(self) -> int:
        """The number of tokens in the cache."""
        return self._length

    def reset(self) -> None:
        """Empties the cache."""
        self._length = 0
        self._states = list(self._empty)

    def forward(self, tokens: Sequence[int]) -> Tensor:
        """Adds tokens to the cache.

        Args:
            tokens: Their ids, at least one.

        Returns:
            The logits of the token behind the last one, float32 ``[1, vocabulary]``.

        Raises:
            ValueError: There is no token, or the cache cannot hold them.
        """
        if not len(tokens):
            raise ValueError("CausalLM.forward: tokens is empty")
        if self._length + len(tokens) > self.max_length:
            raise ValueError(
                f"CausalLM.forward: the cache holds {self._length} of {self.max_length} tokens; {len(tokens)} more "
                "do not fit"
            )
        if self._prompt is not None and not self._length and len(tokens) > 1:
            return self._run(self._prompt, tokens)
        for token in tokens[:-1]:
            self._run(self._step, [token])
        return self._run(self._step, tokens[-1:])

    def _run(self, model: Model, tokens: Sequence[int]) -> Tensor:
        ids = Tensor.from_numpy(np.array([tokens], np.int64))
        start = Tensor.from_numpy(np.array(self._length, np.int64))
        logits, *states = model.execute(ids, start, *self._states)
        self._states, self._length = states, self._length + len(tokens)
        return logits


class _Step(torch.nn.Module):
    """The model with its cache as arguments and results.

    Args:
        model: The model.
        max_length: The most tokens in the cache.
        is_empty: Whether the cache is empty, which layers with a state compute otherwise.
        has_mask: Whether the model gets a mask of the tokens that count: all of them. Some make one of a size that
            depends on the number of tokens in the cache.
    """

    def __init__(
        self, model: torch.nn.Module, max_length: int, is_empty: bool, has_mask: bool
    ) -> None:
        super().__init__()
        self.model = model
        self.max_length, self.has_mask = max_length, has_mask
        arguments = inspect.signature(model.forward).parameters
        named = [name for name in _CACHE_ARGUMENTS if name in arguments]
        if not named:
            raise ImportFailure(
                f"{type(model).__name__} takes no cache ({', '.join(_CACHE_ARGUMENTS)}): it cannot generate token "
                "by token"
            )
        self._argument = named[0]
        self._options: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in arguments:
            self._options["logits_to_keep"] = 1
        if has_mask:
            self._options["attention_mask"] = torch.ones((1, max_length), dtype=torch.int64)
        self._has_positions = "position_ids" in arguments
        self._cache = _static_cache(model, max_length)
        try:
            # layers make their tensors when they are first used
            self._call(torch.zeros((1, 2), dtype=torch.int64), torch.tensor(0))
        except Exception as error:
            raise ImportFailure(
                f"{type(model).__name__} does not run with a static cache: "
                f"{error_line(error)}{_place(error)}"
            ) from error
        self._places = list(_tensors(self._cache))
        # the call above has written its tokens
        self.empty = [_get(container, name).zero_() for container, name in self._places]
        """The tensors of the cache without tokens."""
        if is_empty:
            self._cache.reset()

    def _call(self, tokens: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        options = {self._argument: self._cache, **self._options}
        if self._has_positions:
            options["position_ids"] = (torch.arange(tokens.shape[1]) + start)[None]
        results = self.model(tokens, **options)
        return results.logits[:, -1].to(torch.float32)

    def forward(
        self, tokens: torch.Tensor, start: torch.Tensor, states: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        for (container, name), state in zip(self._places, states, strict=True):
            # layers write into their tensors; inputs are not to be changed
            _set(container, name, state.clone())
        for layer in self._cache.layers:
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = start.clone()
        logits = self._call(tokens, start)
        return (logits, *(_get(container, name) for container, name in self._places))


def _static_cache(model: torch.nn.Module, max_length: int) -> Any:
    """An empty cache of constant shapes, all layers of `max_length` tokens."""
    from transformers import StaticCache, cache_utils

    config: Any = model.config
    try:
        cache = StaticCache(config=config.get_text_config(decoder=True), max_cache_len=max_length)
    except Exception as error:
        raise ImportFailure(
            f"{type(model).__name__}: transformers has no static cache for it: {error}"
        ) from error
    for number, layer in enumerate(cache.layers):
        # those of a window choose by Python numbers where they write: the model's mask has the window too
        if isinstance(layer, cache_utils.StaticSlidingWindowLayer):
            states = getattr(layer, "number_of_states", None)
            cache.layers[number] = (
                cache_utils.StaticLayer(max_length)
                if states is None
                else cache_utils.LinearAttentionAndStaticFullAttentionLayer(max_length, states)
            )
    return cache


def _tensors(cache: Any) -> Iterator[tuple[Any, Any]]:
    """The places of a cache's tensors: an object or dictionary, and a name in it."""
    for layer in cache.layers:
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                yield from ((value, key) for key, v in value.items() if torch.is_tensor(v))
            elif torch.is_tensor(value) and name != "cumulative_length":
                yield layer, name


def _get(container: Any, name: Any) -> Any:
    return container[name] if isinstance(container, dict) else getattr(container, name)


def _set(container: Any, name: Any, value: torch.Tensor) -> None:
    if isinstance(container, dict):
        container[name] = value
    else:
        setattr(container, name, value)


def _export_step(
    model: torch.nn.Module, max_length: int, is_prompt: bool = False, has_mask: bool | None = None
) -> tuple[_Step, Graph]:
    """A program of the model, as a module and as a graph.

    Args:
        model: The model.
        max_length: The most tokens in the cache.
        is_prompt: Whether it takes any number of tokens from two on, and an empty cache; else one token.
        has_mask: Whether the model gets a mask; None: where it does not work without.
    """
    takes_mask = "attention_mask" in inspect.signature(model.forward).parameters
    # without a mask first
    ways = [False, *[True] * takes_mask] if has_mask is None else [has_mask]
    failures: list[ImportFailure] = []
    for mask in ways:
        try:
            step = _Step(model, max_length, is_prompt, mask)
            return step, _exported_step(step, is_prompt)
        except UnsupportedOpsError:
            raise
        except ImportFailure as error:
            failures.append(error)
    raise failures[0]


def _exported_step(step: _Step, is_prompt: bool) -> Graph:
    states = step.empty
    length = torch.export.Dim("length", min=2, max=step.max_length)
    tokens = torch.zeros((1, 3 if is_prompt else 1), dtype=torch.int64)
    shapes = ({1: length}, None, [None] * len(states)) if is_prompt else None
    name = type(step.model).__name__
    arguments = (tokens, torch.tensor(0 if is_prompt else 2), states)
    try:
        # torch prints a program that it cannot finish
        with contextlib.redirect_stderr(io.StringIO()):
            program = torch.export.export(step, arguments, dynamic_shapes=shapes, strict=False)
        return from_exported(program, name)
    except ImportFailure:
        raise
    except Exception as error:
        raise ImportFailure(
            f"torch.export cannot take {name}: {error_line(error)}{_place(error)}"
        ) from error


def _place(error: BaseException) -> str:
    """Where the model's code fails: the last line that is not torch's own."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_TORCH) and frame.filename != __file__
    ]
    if not frames:
        return ""
    last = frames[-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    return f"\n  at {Path(last.filename).name}:{last.lineno}: {line}"
