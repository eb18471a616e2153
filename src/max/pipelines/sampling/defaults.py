"""How tokens are chosen when nobody says."""

from __future__ import annotations

from dataclasses import replace

from max.interfaces import (
    SamplingParams,
    SamplingParamsGenerationConfigDefaults,
    SamplingParamsInput,
)

_WAYS = ("temperature", "top_k", "top_p", "min_p")


def sampling_params_for(
    given: SamplingParamsInput, defaults: SamplingParamsGenerationConfigDefaults
) -> SamplingParams:
    """The parameters of a request that a user makes by hand.

    Greedy, unless the user gives a way to sample, or the model's generation_config.json has
    ``"do_sample": true``: there transformers samples too.

    Args:
        given: What the user gave.
        defaults: What the model says.

    Raises:
        ValueError: A value is out of its range.
    """
    if defaults.do_sample is None and all(getattr(given, name) is None for name in _WAYS):
        defaults = replace(defaults, do_sample=False)
    return SamplingParams.from_input_and_generation_config(given, defaults)
