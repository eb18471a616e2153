"""The sampling parameters of requests made by hand: greedy by default."""

from __future__ import annotations

from dataclasses import replace

from max.interfaces import (
    SamplingParams,
    SamplingParamsGenerationConfigDefaults,
    SamplingParamsInput,
)

_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p")


def sampling_params_for(
    params: SamplingParamsInput, defaults: SamplingParamsGenerationConfigDefaults
) -> SamplingParams:
    """The sampling parameters of a request.

    Greedy, unless the user sets one of temperature, top_k, top_p and min_p, or the model's
    generation_config.json has ``"do_sample": true``, as in transformers.

    Args:
        params: The user's parameters.
        defaults: The parameters of the model's generation_config.json.

    Raises:
        ValueError: A value is out of its range.
    """
    if defaults.do_sample is None and all(
        getattr(params, name) is None for name in _SAMPLING_FIELDS
    ):
        defaults = replace(defaults, do_sample=False)
    return SamplingParams.from_input_and_generation_config(params, defaults)
