"""Mixtures of experts in decoders."""

from __future__ import annotations

from dataclasses import dataclass

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, Weight, ops
from max.nn.layer import Module
from max.nn.linear import MLP, Linear
from max.nn.moe import ExpertRouting, RoutedMoEGate, run_experts

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
    """

    count: int
    per_token: int
    size: int
    routing: ExpertRouting = ExpertRouting()
    shared_size: int = 0
    shared_gate: bool = False
    dense_layers: frozenset[int] = frozenset()


class DecoderExperts(Module):
    """The weighted sum of the gated MLPs that a gate chooses for each token, and a shared MLP where there is one.

    Weights: those of ``gate``, ``experts.gate_proj.weight`` and ``experts.up_proj.weight`` ``[count, size, hidden]``,
    ``experts.down_proj.weight`` ``[count, hidden, size]``, those of ``shared`` and ``shared_gate``.

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
            [device], hidden_size, count, experts.per_token, dtype, experts.routing
        )
        self.gate_proj = Weight(
            "experts.gate_proj.weight", dtype, [count, size, hidden_size], device
        )
        self.up_proj = Weight("experts.up_proj.weight", dtype, [count, size, hidden_size], device)
        self.down_proj = Weight(
            "experts.down_proj.weight", dtype, [count, hidden_size, size], device
        )
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
        chosen, weights = self.gate(x)
        y = run_experts(x, chosen, weights, (self.gate_proj, self.up_proj), self.down_proj)
        if self.shared is None:
            return y
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * ops.sigmoid(self.shared_gate(x))
        return y + ops.cast(shared, y.dtype)
