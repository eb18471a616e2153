"""How the next token of a request is chosen, and when its generation ends."""

from __future__ import annotations

import logging
import operator
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias, cast

logger = logging.getLogger("max.interfaces")

LogitsProcessors: TypeAlias = Sequence[Callable[[Any], None]]
"""A callable that gets a :class:`ProcessorInputs`, whose context holds these parameters."""


@dataclass
class SamplingParamsInput:
    """Sampling parameters from a user; ``None`` stands for "not set".

    The fields are those of :class:`SamplingParams`.
    """

    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    temperature: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    detokenize: bool | None = None
    seed: int | None = None
    logits_processors: LogitsProcessors | None = None
    logit_bias: dict[int, float] | None = None
    thinking_temperature: float | None = None


@dataclass
class SamplingParamsGenerationConfigDefaults:
    """The sampling parameters in a model's generation_config.json; ``None`` if a value is not set.

    Args:
        temperature: The temperature.
        top_p: The total probability of the candidates (nucleus sampling).
        top_k: The number of candidates.
        repetition_penalty: The repetition penalty.
        max_new_tokens: The maximum number of new tokens.
        min_new_tokens: The minimum number of new tokens.
        do_sample: ``False`` means greedy sampling.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    do_sample: bool | None = None

    @property
    def values_to_update(self) -> dict[str, float | int]:
        """The values that are set, by the names of the fields."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


_NUMBERS = (
    "top_p", "min_p", "temperature", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "thinking_temperature",
)  # fmt: skip
_INTEGERS = ("top_k", "max_new_tokens", "min_new_tokens", "seed")


def _random_seed() -> int:
    return secrets.randbits(32)


@dataclass
class SamplingParams:
    """How the next token of a request is chosen, and when its generation ends.

    Args:
        top_k: Sample among the k most likely tokens; -1 or 0: all, 1: greedy.
        top_p: Sample among the most likely tokens whose probabilities sum to this value.
        min_p: Drop tokens whose probability is below this fraction of the greatest one, in [0, 1].
        temperature: Divides the logits; higher values give more varied text. 0 is greedy and sets top_k to 1.
        frequency_penalty: Subtracted from a token's logit for each of its occurrences in the output.
        presence_penalty: Subtracted from a token's logit if the output contains it.
        repetition_penalty: Divides the logit of each generated token if it is positive, and multiplies it otherwise.
        max_new_tokens: The maximum number of new tokens; None: up to the end of the context.
        min_new_tokens: The minimum number of new tokens before an end-of-sequence token.
        ignore_eos: Whether to continue after an end-of-sequence token.
        stop: Texts that end the generation.
        stop_token_ids: Tokens that end the generation.
        detokenize: Whether to decode the tokens.
        seed: The seed of the random numbers; by default, and for None, drawn from the system's random source.
        logits_processors: Callables that change the logits before sampling.
        logit_bias: Values to add to the logits of tokens before sampling.
        thinking_temperature: The temperature of tokens of reasoning, for a model whose chat template has ``<think>``;
            None: `temperature`.

    Raises:
        ValueError: A value is out of its range; the message states the value and the range.
    """

    top_k: int = -1
    top_p: float = 1
    min_p: float = 0.0
    temperature: float = 1
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    ignore_eos: bool = False
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    detokenize: bool = True
    seed: int = field(default_factory=_random_seed)
    logits_processors: LogitsProcessors | None = None
    logit_bias: dict[int, float] | None = None
    thinking_temperature: float | None = None

    def __post_init__(self) -> None:
        def require(fits: bool, name: str, what: str) -> None:
            if not fits:
                value = getattr(self, name)
                raise ValueError(f"SamplingParams: {name} is {value!r}; it must be {what}")

        if cast("int | None", self.seed) is None:
            self.seed = _random_seed()
        for name in _INTEGERS:
            value = getattr(self, name)
            if name == "max_new_tokens" and value is None:
                continue
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise TypeError(f"SamplingParams: {name} is {value!r}; it must be an integer")
            setattr(self, name, operator.index(value))
        for name in _NUMBERS:
            value = getattr(self, name)
            if name == "thinking_temperature" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"SamplingParams: {name} is {value!r}; it must be a number")
        if self.top_k == 0:
            self.top_k = -1
        if self.temperature == 0:
            self.top_k = 1
        top_k_fits = self.top_k == -1 or 1 <= self.top_k < 2**31
        require(top_k_fits, "top_k", "-1 (all tokens), or from 1 to 2**31 - 1")
        require(0 < self.top_p <= 1, "top_p", "over 0 and at most 1")
        require(0 <= self.min_p <= 1, "min_p", "from 0 to 1")
        require(0 <= self.temperature < float("inf"), "temperature", "at least 0 (0 is greedy)")
        thinking_fits = 0 <= (self.thinking_temperature or 0) < float("inf")
        require(thinking_fits, "thinking_temperature", "None or at least 0 (0 is greedy)")
        repetition_fits = 0 < self.repetition_penalty < float("inf")
        require(repetition_fits, "repetition_penalty", "a number over 0 (1 is none)")
        for name in ("frequency_penalty", "presence_penalty"):
            require(abs(getattr(self, name)) < float("inf"), name, "a number (0 is none)")
        require(
            self.max_new_tokens is None or self.max_new_tokens >= 1,
            "max_new_tokens",
            "None or at least 1",
        )
        require(self.min_new_tokens >= 0, "min_new_tokens", "at least 0")
        require(0 <= self.seed < 2**64, "seed", "from 0 to 2**64 - 1")
        stops = self.stop_token_ids or ()
        require(all(0 <= t < 2**31 for t in stops), "stop_token_ids", "numbers of tokens")
        biases = (self.logit_bias or {}).items()
        require(
            all(0 <= token < 2**31 and abs(bias) < float("inf") for token, bias in biases),
            "logit_bias",
            "numbers of tokens with finite numbers",
        )
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"SamplingParams: min_new_tokens is {self.min_new_tokens}, more than "
                f"max_new_tokens, {self.max_new_tokens}"
            )
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        for text in cast("list[Any]", self.stop or ()):
            if not isinstance(text, str):
                raise TypeError(f"SamplingParams: stop holds {text!r}; it must hold texts")
        if self.stop is not None and any(not text for text in self.stop):
            raise ValueError("SamplingParams: stop holds an empty text, which would stop at once")

    @classmethod
    def from_input_and_generation_config(
        cls,
        input_params: SamplingParamsInput,
        sampling_params_defaults: SamplingParamsGenerationConfigDefaults,
    ) -> SamplingParams:
        """Creates the parameters of a request.

        The user's values take precedence over the model's generation config, which takes precedence over the defaults.

        Args:
            input_params: The user's values.
            sampling_params_defaults: The values of the model's generation config.
        """
        user = {
            f.name: value
            for f in fields(input_params)
            if (value := getattr(input_params, f.name)) is not None
        }
        model: dict[str, Any] = dict(sampling_params_defaults.values_to_update)
        if model.pop("do_sample", None) is False:
            # the top_k in the config of a greedy model is only the default of Hugging Face, 0 or 50
            model |= {"temperature": 0, "top_k": 1}
            if {"temperature", "top_k", "top_p", "min_p"} & user.keys():
                # sampling options of the user override the model's greedy default
                del model["temperature"], model["top_k"]
        limit = user.get("max_new_tokens")
        # a limit that is not an integer is rejected below
        if isinstance(limit, int) and model.get("min_new_tokens", 0) > limit:
            model["min_new_tokens"] = limit
        return cls(**{**model, **user})

    def log_sampling_info(self) -> None:
        """Logs the parameters, one per line, at level info."""
        logger.info("Sampling parameters")
        for f in fields(self):
            if f.name != "logits_processors":
                logger.info("    %-20s : %s", f.name, getattr(self, f.name))
