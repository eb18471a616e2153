"""Copies the operands of each op into the memory of the device that the op runs on.

An op runs on the device of its results. `mok.device_copy` copies an operand from another memory (a scalar of the CPU, a
weight declared there), once for all ops of a block on that device. A `mo.transfer` between memories becomes such a
copy; between devices that share their memory it stays a view.

A predicate is staged on the CPU. It stays where it is computed: the device may then carry out the branch or the loop by
itself, or the host reads it there.
"""

from __future__ import annotations

from xdsl.ir import Block, Operation, SSAValue

from max._backends.backend import Backends
from max._compiler.analysis.devices import device_of, index_of
from max._compiler.lowering.lowered_graph import UnsupportedOpError
from max._compiler.mok import DeviceCopyOp
from max._compiler.passes.base import ops_of
from max._compiler.passes.canonicalize import insert_before
from max.mlir import (
    BufferType,
    IfOp,
    MoOp,
    ShapedType,
    SubgraphOp,
    TensorType,
    WhileOp,
)
from max.mlir.ops.constant import TransferOp
from max.mlir.ops.control import control_callees

__all__ = ["place_operands"]


def place_operands(block: Block, backends: Backends) -> None:
    """Inserts copies between the memories of a session's devices.

    Raises:
        UnsupportedOpError: An op writes to a buffer of another device than its own.
        ValueError: The session lacks the device of an op.
    """
    if len(backends) == 1:
        return
    # a value that several ops of a device read is copied once
    copies: dict[tuple[SSAValue, int], SSAValue] = {}
    for op in ops_of(block):
        if type(op) is TransferOp:
            _transfer(op, backends)
        # a device that runs jumps reads the predicate where it is computed; otherwise the host copies it
        elif isinstance(op, IfOp):
            _use_predicate_in_place(op)
        elif isinstance(op, WhileOp):
            _use_condition_in_place(op)
        elif not op.spec.on_any_device:
            device = device_of(op, backends)
            for position, operand in enumerate(op.operands):
                if (
                    isinstance(operand.type, ShapedType)
                    and index_of(operand.type, backends) != device
                ):
                    if (operand, device) not in copies:
                        copies[operand, device] = _device_copy(op, operand, device, backends)
                    op.operands[position] = copies[operand, device]


def _transfer(op: MoOp, backends: Backends) -> None:
    """Replaces a transfer between memories by `mok.device_copy`; between devices of one memory it stays."""
    x, result = op.operands[0], op.results[0]
    if index_of(x.type, backends) == index_of(result.type, backends):
        return
    assert isinstance(result.type, TensorType)
    result.replace_all_uses_with(insert_before(op, DeviceCopyOp.of(x, result.type, op.location)))
    op.detach()
    op.erase()


def _use_predicate_in_place(op: MoOp) -> None:
    """Replaces the first operand of an op, if it is copied from another device, by the source of the copy."""
    copy = op.operands[0].owner
    if isinstance(copy, MoOp) and (isinstance(copy, DeviceCopyOp) or type(copy) is TransferOp):
        op.operands[0] = copy.operands[0]


def _use_condition_in_place(op: WhileOp) -> None:
    """The same for the predicate that the condition of a loop returns, unless other ops call the condition."""
    module: Operation = op
    while (parent := module.parent_op()) is not None:
        module = parent
    name, _ = op.callees
    ops = list(module.walk())
    bodies = [other.callees[1] for other in ops if isinstance(other, WhileOp)]
    others = [n for other in ops if not isinstance(other, WhileOp) for n in control_callees(other)]
    # the graph's output would change for its other callers too
    if name in (*bodies, *others):
        return
    (condition,) = [o for o in ops if isinstance(o, SubgraphOp) and o.sym_name == name]
    output = condition.output
    assert isinstance(output, MoOp)
    _use_predicate_in_place(output)


def _device_copy(op: MoOp, operand: SSAValue, device: int, backends: Backends) -> SSAValue:
    """The operand copied to the device of the op."""
    type_ = operand.type
    assert isinstance(type_, ShapedType)
    # a write to a copy would be lost
    if isinstance(type_, BufferType):
        raise UnsupportedOpError(
            f"{op.name} runs on {backends[device].device}, and takes {type_.short}: a buffer is read and written on "
            "its own device only"
        )
    device_type = next(
        v.type
        for v in (*op.results, *op.operands)
        if isinstance(v.type, ShapedType) and index_of(v.type, backends) == device
    )
    result = TensorType.get(type_.dtype, type_.shape, device_type.device)
    return insert_before(op, DeviceCopyOp.of(operand, result, op.location))
