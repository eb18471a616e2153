"""Mixtures of experts in decoders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, Weight, ops
from max.nn.clamp import clamp
from max.nn.layer import Module
from max.nn.linear import MLP, Linear
from max.nn.moe import ExpertRouting, RoutedMoEGate, run_experts
from max.pipelines.models.feed_forward import PLAIN_ACTIVATIONS

__all__ = ["DecoderExperts", "Experts"]


@dataclass(frozen=True)
class Experts:
    """The experts of a model's layers.

    Args:
        count: The number of experts of a layer.
        per_token: The number of experts of a token.
        size: The inner size of an expert.
        routing: How scores become choices and weights.
        shared_size: The inner size of an MLP that all tokens share; 0: there is none.
        shared_gate: Whether the shared MLP's result is multiplied by the sigmoid of a linear layer.
        dense_layers: The layers with an MLP instead.
        bias: Whether the experts' projections have biases.
        gate_bias: Whether the gate has a bias.
        clamped_swiglu: ``(alpha, limit)``: instead of ``silu(gate) * up``, ``(up + 1) * gate * sigmoid(alpha * gate)`` of
            values that are clamped: the gate to at most ``limit``, the other to ``[-limit, limit]``.
        gate_up_layout: How a checkpoint's fused projection stores an expert's rows: all rows of the gate, then those of
            the up projection (``rows``), or alternately (``pairs``).
        weights_first: Whether tokens are multiplied by their weights, and not results.
        activation: The activation of the gate, a key of `max.pipelines.models.feed_forward.PLAIN_ACTIVATIONS`.
    """

    count: int
    per_token: int
    size: int
    routing: ExpertRouting = ExpertRouting()
    shared_size: int = 0
    shared_gate: bool = False
    dense_layers: frozenset[int] = frozenset()
    bias: bool = False
    gate_bias: bool = False
    clamped_swiglu: tuple[float, float] | None = None
    gate_up_layout: Literal["rows", "pairs"] = "rows"
    weights_first: bool = False
    activation: str = "silu"


class DecoderExperts(Module):
    """The weighted sum of the gated MLPs that a gate chooses for each token, and a shared MLP where there is one.

    Weights: those of ``gate``, ``experts.gate_proj.weight`` and ``experts.up_proj.weight`` ``[count, size, hidden]``,
    ``experts.down_proj.weight`` ``[count, hidden, size]``, with biases ``experts.….bias``; those of ``shared`` and
    ``shared_gate``.

    Args:
        experts: The experts.
        hidden_size: The size of hidden states.
        dtype: The dtype of the weights.
        device: Where it runs.
    """

    def __init__(
        self, experts: Experts, hidden_size: int, dtype: DType, device: DeviceRef
    ) -> None:
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

        self.gate_proj, self.gate_proj_bias = weights("gate_proj", size, hidden_size)
        self.up_proj, self.up_proj_bias = weights("up_proj", size, hidden_size)
        self.down_proj, self.down_proj_bias = weights("down_proj", hidden_size, size)
        self.clamped_swiglu, self.weights_first = experts.clamped_swiglu, experts.weights_first
        self.activation = experts.activation
        self.shared: MLP | None = None
        self.shared_gate: Linear | None = None
        if experts.shared_size:
            self.shared = MLP(dtype, None, hidden_size, experts.shared_size, [device])
        if experts.shared_gate:
            self.shared_gate = Linear(hidden_size, 1, dtype, device)

    def __call__(self, x: TensorValue) -> TensorValue:
        """The result, of x's shape and dtype.

        Args:
            x: ``[tokens, hidden_size]``.
        """
        y = self.run(x, *self.gate(x))
        if self.shared is None:
            return y
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * ops.sigmoid(self.shared_gate(x))
        return y + ops.cast(shared, y.dtype)

    def run(self, x: TensorValue, chosen: TensorValue, weights: TensorValue) -> TensorValue:
        """The weighted sum of the chosen experts' results, of x's shape and dtype.

        Args:
            x: ``[tokens, hidden_size]``.
            chosen: The experts of each token, integers ``[tokens, per_token]``.
            weights: Their weights, of that shape.
        """
        biases = None
        if self.gate_proj_bias is not None and self.up_proj_bias is not None:
            biases = TensorValue(self.gate_proj_bias), TensorValue(self.up_proj_bias)
        return run_experts(
            x,
            chosen,
            weights,
            (self.gate_proj, self.up_proj),
            self.down_proj,
            activation=self._activation,
            gate_up_bias=biases,
            down_bias=self.down_proj_bias,
            weights_first=self.weights_first,
            gate_up_encoding=(
                self.gate_proj.quantization_encoding,
                self.up_proj.quantization_encoding,
            ),
            down_encoding=self.down_proj.quantization_encoding,
        )

    def _activation(self, gate: TensorValue, up: TensorValue) -> TensorValue:
        """The input of the down projection."""
        if self.clamped_swiglu is None:
            return PLAIN_ACTIVATIONS[self.activation](gate) * up
        alpha, limit = self.clamped_swiglu
        gate = clamp(gate, max=limit)
        return (clamp(up, min=-limit, max=limit) + 1) * gate * ops.sigmoid(gate * alpha)
