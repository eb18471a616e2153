"""The layers of a Llama, and its graph (inputs and outputs: `max.pipelines.models.decoder.graph`)."""

from __future__ import annotations

from functools import partial

from max.pipelines.models.decoder.decoder import Decoder
from max.pipelines.models.decoder.graph import build_graph as build_decoder_graph
from max.pipelines.models.decoder.graph import input_types
from max.pipelines.models.decoder.weights import weights_registry as decoder_weights_registry

__all__ = ["Llama3", "build_graph", "input_types", "weights_registry"]


class Llama3(Decoder):
    """A Llama: the base decoder without changes."""


build_graph = partial(build_decoder_graph, Llama3)
"""The graph of a Llama: `max.pipelines.models.decoder.graph.build_graph` without its first argument."""

weights_registry = partial(decoder_weights_registry, Llama3)
"""The weights of a Llama: `max.pipelines.models.decoder.weights.weights_registry` without its first argument."""
