from __future__ import annotations

from max.graph.weights import WeightData, Weights


def convert_safetensor_state_dict(
    state_dict: dict[str, Weights], **unused_kwargs
) -> dict[str, WeightData]:
    """Names without ``model.``, as the network has them."""
    return {name.removeprefix("model."): value.data() for name, value in state_dict.items()}
