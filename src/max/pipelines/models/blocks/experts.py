"""Mixtures of experts in decoders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from max._dataclass import dataclass
from max.graph import TensorValue, Weight, ops
from max.nn.activation import ACTIVATIONS
from max.nn.clamp import clamp
from max.nn.layer import Layer, Module
from max.nn.layers.experts import RowChange
from max.nn.layers.linear import Linear
from max.nn.layers.mlp import MLP
from max.nn.moe import ExpertRouting, RoutedMoEGate, run_experts
from max.pipelines.models.blocks.feed_forward import PlainMLP
from max.pipelines.models.blocks.mixer import Site

__all__ = ["DecoderExperts", "Experts"]


@dataclass(frozen=True)
class Experts:
    """The experts of a model's layers.

    Args:
        count: The number of experts of a layer.
        per_token: The number of experts that are selected per token.
        size: The inner size of an expert.
        routing: How scores become selected experts and weights.
        shared_size: The inner size of an MLP that all tokens pass through; 0: there is none.
        shared_gate: Whether the shared MLP's result is multiplied by the sigmoid of a linear layer.
        bias: Whether the experts' projections have biases.
        gate_bias: Whether the gate has a bias.
        clamped_swiglu: ``(alpha, limit)``: the activation is ``(up + 1) * gate * sigmoid(alpha * gate)`` instead of
            ``silu(gate) * up``, with `gate` clamped to at most ``limit`` and `up` to ``[-limit, limit]``.
        gate_up_layout: How a checkpoint's fused projection stores the rows of an expert: all gate rows, then all up
            rows (``rows``), or alternating (``pairs``).
        weights_first: Whether the routing weights multiply the experts' inputs instead of their results.
        shared_bias: Whether the projections of the shared MLP have biases.
        latent_size: The size of the latents that experts read and write, projected from hidden states and back; None:
            experts read and write hidden states.
        latent_bias: Whether the two latent projections have biases.
        activation: The activation of all MLPs, a key of `max.nn.activation.ACTIVATIONS`.
        gated: Whether MLPs are gated.
    """

    count: int
    per_token: int
    size: int
    routing: ExpertRouting = ExpertRouting()
    shared_size: int = 0
    shared_gate: bool = False
    bias: bool = False
    gate_bias: bool = False
    clamped_swiglu: tuple[float, float] | None = None
    gate_up_layout: Literal["rows", "pairs"] = "rows"
    weights_first: bool = False
    shared_bias: bool = False
    latent_size: int | None = None
    latent_bias: bool = False
    activation: str = "silu"
    gated: bool = True

    def layer(self, site: Site) -> Layer:
        """The layer.

        Args:
            site: What it needs from its model.
        """
        return DecoderExperts(self, site)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of features that are split over devices."""
        return self.size, self.shared_size

    @property
    def features(self) -> int:
        """The number of features that are computed for a token."""
        return self.per_token * self.size + self.shared_size

    def part(self, share: Callable[[int], int]) -> Experts:
        """One device's part of the features of each expert.

        Args:
            share: The device's share of a number of features.
        """
        return replace(self, size=share(self.size), shared_size=share(self.shared_size))


class DecoderExperts(Module):
    """The weighted sum of the MLPs that the router selects for each token, plus the shared MLP if there is one.

    Weights: those of ``gate``, ``experts.gate_proj.weight`` (if MLPs are gated) and ``experts.up_proj.weight``
    ``[count, size, width]``, ``experts.down_proj.weight`` ``[count, width, size]``, with biases ``experts.….bias``;
    those of ``shared`` and ``shared_gate``. The width is the hidden size, or the latent size if ``latent_in`` and
    ``latent_out`` project to latents and back.

    Args:
        experts: The experts of a layer.
        site: What the layer needs from its model.

    Attributes:
        count: The number of experts.
        projections: Inputs and outputs of the projections of an expert, by name.
    """

    def __init__(self, experts: Experts, site: Site) -> None:
        hidden_size, dtype, device = site.hidden_size, site.dtype, site.device
        activation, gated = experts.activation, experts.gated
        count, size = experts.count, experts.size
        self.gate = RoutedMoEGate(
            [device],
            hidden_size,
            count,
            experts.per_token,
            dtype,
            experts.routing,
            experts.gate_bias,
        )

        def weights(name: str, rows: int, columns: int) -> tuple[Weight, Weight | None]:
            name = f"experts.{name}"
            bias = Weight(f"{name}.bias", dtype, [count, rows], device) if experts.bias else None
            return Weight(f"{name}.weight", dtype, [count, rows, columns], device), bias

        self._change: Callable[[TensorValue, TensorValue], RowChange] | None = None
        latent, bias = experts.latent_size, experts.latent_bias
        # experts of latents are narrower: the routing still reads the whole hidden state
        width = hidden_size if latent is None else latent
        self.count = count
        self.projections = {
            **({"gate_proj": (width, size)} if gated else {}),
            "up_proj": (width, size),
            "down_proj": (size, width),
        }
        self.gate_proj: Weight | None = None
        self.gate_proj_bias: Weight | None = None
        if gated:
            self.gate_proj, self.gate_proj_bias = weights("gate_proj", size, width)
        self.up_proj, self.up_proj_bias = weights("up_proj", size, width)
        self.down_proj, self.down_proj_bias = weights("down_proj", width, size)
        self.latent_in: Linear | None = None
        self.latent_out: Linear | None = None
        if latent is not None:
            self.latent_in = Linear(hidden_size, latent, dtype, device, has_bias=bias)
            self.latent_out = Linear(latent, hidden_size, dtype, device, has_bias=bias)
        self.clamped_swiglu, self.weights_first = experts.clamped_swiglu, experts.weights_first
        self.activation = activation
        self.shared: MLP | PlainMLP | None = None
        self.shared_gate: Linear | None = None
        inner, biased = experts.shared_size, experts.shared_bias
        if inner and gated:
            self.shared = MLP(
                dtype, None, hidden_size, inner, [device],
                has_bias=biased, activation_function=activation,
            )  # fmt: skip
        elif inner:
            self.shared = PlainMLP(
                dtype, hidden_size, inner, device, has_bias=biased, activation=activation
            )
        if experts.shared_gate:
            self.shared_gate = Linear(hidden_size, 1, dtype, device)

    def change_products(self, change: Callable[[TensorValue, TensorValue], RowChange]) -> None:
        """Changes the experts' products; see `run_experts`.

        Args:
            change: Called with the token and the expert of each row.
        """
        self._change = change

    def __call__(self, x: TensorValue) -> TensorValue:
        """The result, of x's shape and dtype.

        Args:
            x: ``[tokens, hidden_size]``.
        """
        chosen, weights = self.gate(x)
        y = self.run(x if self.latent_in is None else self.latent_in(x), chosen, weights)
        if self.latent_out is not None:
            y = ops.cast(self.latent_out(y), x.dtype)
        # shared experts read the hidden state, not the latent
        if self.shared is None:
            return y
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * ops.sigmoid(self.shared_gate(x))
        return y + ops.cast(shared, y.dtype)

    def run(self, x: TensorValue, expert_ids: TensorValue, weights: TensorValue) -> TensorValue:
        """The weighted sum of the selected experts' results, of x's shape and dtype.

        Args:
            x: Hidden states or latents ``[tokens, width]``.
            expert_ids: The selected experts of each token, integers ``[tokens, per_token]``.
            weights: Their weights ``[tokens, per_token]``.
        """
        projections = [p for p in (self.gate_proj, self.up_proj) if p is not None]
        # biases come all together or not at all, as `experts.bias` says
        vectors = [b for b in (self.gate_proj_bias, self.up_proj_bias) if b is not None]
        return run_experts(
            x,
            expert_ids,
            weights,
            tuple(projections),
            self.down_proj,
            activation=self._activation,
            gate_up_bias=tuple(map(TensorValue, vectors)) or None,
            down_bias=self.down_proj_bias,
            weights_first=self.weights_first,
            gate_up_encoding=tuple(p.quantization_encoding for p in projections),
            down_encoding=self.down_proj.quantization_encoding,
            change=self._change,
        )

    def _activation(self, gate: TensorValue, up: TensorValue | None = None) -> TensorValue:
        """The input of the down projection; `up` is None if MLPs are not gated."""
        if up is None:
            return ACTIVATIONS[self.activation](gate)
        if self.clamped_swiglu is None:
            return ACTIVATIONS[self.activation](gate) * up
        alpha, limit = self.clamped_swiglu
        # the gate is clamped from above only, and 1 is added to the other factor, as in gpt-oss
        gate = clamp(gate, max=limit)
        return (clamp(up, min=-limit, max=limit) + 1) * gate * ops.sigmoid(gate * alpha)
