"""Runs the experts that a gate chose: grouped products per expert, and the weighted sum of their outputs."""

from __future__ import annotations

from collections.abc import Callable

from max.dtype import DType
from max.graph import TensorValue, ops
from max.graph.quantization import QuantizationEncoding
from max.nn.kernels.experts import grouped_matmul_ragged, moe_create_indices
from max.nn.layer import Layer

__all__ = ["Activation", "ExpertProduct", "RowChange", "run_experts", "swiglu"]

Activation = Callable[..., TensorValue]
"""Maps the outputs of the gate and up projections, or of up only, to the input of the down projection."""

RowChange = Callable[[int, TensorValue, TensorValue], TensorValue]
"""Changes products of experts, such as by adding the terms of adapters; called with the number of the projection (down
is the last one), its rows and their products.
"""


def swiglu(gate: TensorValue, up: TensorValue) -> TensorValue:
    """``silu(gate) * up``."""
    return ops.silu(gate) * up


class ExpertProduct(Layer):
    """Multiplies rows by the weights of their experts. It is a layer, so that hooks observe its input and output.

    Args:
        weight: ``[experts, out_dim, in_dim]``, or encoded rows.
        encoding: The encoding of the weight; None: not encoded.

    Attributes:
        weight: The weight.
    """

    def __init__(self, weight: TensorValue, encoding: QuantizationEncoding | None) -> None:
        self.weight, self._encoding = weight, encoding

    def __call__(
        self,
        rows: TensorValue,
        experts: TensorValue,
        starts: TensorValue,
        ids: TensorValue,
        stats: TensorValue,
    ) -> TensorValue:
        """``[rows, out_dim]``, of the rows' dtype.

        Args:
            rows: ``[rows, in_dim]``, sorted by expert.
            experts: The expert of each row, integers ``[rows]``.
            starts: The first row of each group, as `moe_create_indices` returns it.
            ids: The expert of each group, as `moe_create_indices` returns it.
            stats: The maximum number of rows in a group, and the number of groups.
        """
        return grouped_matmul_ragged(
            rows, self.weight, starts, ids, stats, quantization_encoding=self._encoding
        )


def run_experts(
    x: TensorValue,
    experts: TensorValue,
    weights: TensorValue,
    gate_up: TensorValue | tuple[TensorValue, ...],
    down: TensorValue,
    *,
    activation: Activation = swiglu,
    gate_up_bias: TensorValue | tuple[TensorValue, ...] | None = None,
    down_bias: TensorValue | None = None,
    weights_first: bool = False,
    gate_up_encoding: QuantizationEncoding | tuple[QuantizationEncoding | None, ...] | None = None,
    down_encoding: QuantizationEncoding | None = None,
    change: Callable[[TensorValue, TensorValue], RowChange] | None = None,
) -> TensorValue:
    """The weighted sum of the outputs of the experts chosen for each token.

    Args:
        x: ``[tokens, hidden_dim]``.
        experts: The experts of each token, integers ``[tokens, k]``.
        weights: The router weights of these experts, ``[tokens, k]``.
        gate_up: The weights of the gate and up projections: ``[num_experts, 2 * moe_dim, hidden_dim]`` (gate first), a
            pair of ``[num_experts, moe_dim, hidden_dim]``, or a tuple with the up projection only. The last dimension
            of encoded weights is in bytes.
        down: ``[num_experts, hidden_dim, moe_dim]``.
        activation: Maps the outputs of the gate and up projections to the input of the down projection.
        gate_up_bias: ``[num_experts, 2 * moe_dim]``; for a tuple of weights, a tuple of ``[num_experts, moe_dim]``.
        down_bias: ``[num_experts, hidden_dim]``.
        weights_first: Whether a router weight multiplies the expert's input instead of its output.
        gate_up_encoding: The encoding of the gate and up projections, or one encoding per weight of a tuple; None: not
            encoded.
        down_encoding: The encoding of the down projection.
        change: Called with the token and the expert of each row; it returns what changes the products before their
            biases are added. None: nothing does.

    Returns:
        ``[tokens, hidden_dim]``, of the dtype of `x`.

    Raises:
        ValueError: A shape does not fit.
    """
    if x.rank != 2 or experts.rank != 2 or experts.shape != weights.shape:
        raise ValueError(
            f"run_experts: tokens {x!r}, experts {experts!r} and weights {weights!r}; expected [tokens, hidden_dim] "
            "and [tokens, k] twice"
        )
    tokens, count = experts.shape
    chosen = ops.reshape(experts, [tokens * count])
    order, starts, restored, ids, stats = moe_create_indices(chosen, int(down.shape[0]))
    index = ops.cast(order, DType.int64)
    # entries [t * k, (t + 1) * k) of `chosen` are of token t; `order` sorts the entries by expert
    rows = ops.gather(x, index // int(count), axis=0)  # [tokens * k, hidden_dim], sorted by expert
    shares = ops.cast(ops.reshape(weights, [tokens * count, 1]), DType.float32)
    if weights_first:
        rows = ops.cast(ops.cast(rows, DType.float32) * ops.gather(shares, index, axis=0), x.dtype)

    of_rows = ops.gather(chosen, index, axis=0)  # the expert of each row

    changed = None if change is None else change(index // int(count), of_rows)

    def product(
        number: int,
        v: TensorValue,
        weight: TensorValue,
        bias: TensorValue | None,
        encoding: QuantizationEncoding | None,
    ) -> TensorValue:
        y = ExpertProduct(weight, encoding)(v, of_rows, starts, ids, stats)
        if changed is not None:
            y = changed(number, v, y)
        if bias is None:
            return y
        return y + ops.cast(ops.gather(bias, of_rows, axis=0), y.dtype)

    if isinstance(gate_up, tuple):
        biases: tuple[TensorValue | None, ...] = (None,) * len(gate_up)
        if isinstance(gate_up_bias, tuple):
            biases = gate_up_bias
        elif gate_up_bias is not None and len(gate_up) == 1:
            biases = (gate_up_bias,)
        elif gate_up_bias is not None:
            # the bias of both projections, the gate's half first
            width = gate_up[0].shape[1]
            biases = gate_up_bias[:, :width], gate_up_bias[:, width:]
        encodings = (
            gate_up_encoding
            if isinstance(gate_up_encoding, tuple)
            else (gate_up_encoding,) * len(gate_up)
        )
        projected = [
            product(number, rows, weight, bias, encoding)
            for number, (weight, bias, encoding) in enumerate(
                zip(gate_up, biases, encodings, strict=True)
            )
        ]
    else:
        if isinstance(gate_up_bias, tuple) or isinstance(gate_up_encoding, tuple):
            raise ValueError("run_experts: a tuple of biases or encodings for one gate_up weight")
        both = product(0, rows, gate_up, gate_up_bias, gate_up_encoding)
        width = int(both.shape[1]) // 2
        # the gate's half first
        projected = [both[:, :width], both[:, width:]]
    last = len(gate_up) if isinstance(gate_up, tuple) else 1
    y = product(last, activation(*projected), down, down_bias, down_encoding)
    y = ops.gather(y, ops.cast(restored, DType.int64), axis=0)  # in the order of the tokens again
    # the k outputs of a token are added in float32, and rounded once
    wide = ops.cast(y, DType.float32)
    if not weights_first:
        wide = wide * shares
    total = ops.sum(ops.reshape(wide, [tokens, count, down.shape[1]]), axis=1)
    return ops.cast(ops.reshape(total, [tokens, down.shape[1]]), x.dtype)
