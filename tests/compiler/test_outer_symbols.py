"""The symbols that branches and loop bodies share with the graphs around them, and the device of an op."""

from __future__ import annotations

from max._backends.backend import HOST
from max._backends.cpu.backend import cpu_backends
from max._backends.cpu.passes.packed_ops import CodeOp
from max._compiler.analysis.devices import backend_of, device_of
from max._compiler.analysis.outer_symbols import scopes
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.mlir import GraphOp, MoOp
from max.mlir.builtin import ModuleOp

DEVICE = DeviceRef.CPU()


def nested() -> ModuleOp:
    """A loop whose body has a branch: each introduces the number of elements that are not zero as a symbol."""
    types = [TensorType(DType.float32, ["n"], DEVICE), TensorType(DType.int64, [], DEVICE)]
    with Graph("outermost", input_types=types) as graph:
        x, count = (value.tensor for value in graph.inputs)

        def found(name: str) -> TensorValue:
            return ops.shape_to_tensor([ops.nonzero(x, name).shape[0]])[0]

        def body(i: TensorValue) -> TensorValue:
            more = found("in_body")
            (step,) = ops.cond(
                more > 0, [count.type], lambda: found("in_branch"), lambda: ops.constant(1, DType.int64, DEVICE)
            )  # fmt: skip
            return i + step

        (total,) = ops.while_loop([count], lambda i: i < 9, body)
        graph.output(total, found("later"))
    return graph.to_mlir()


def test_nested_graphs_share_the_symbols_of_all_around_them() -> None:
    module = nested()
    found = scopes(module)
    graphs = {op.sym_name for op in module.body.block.ops if isinstance(op, GraphOp)}
    assert set(found) == graphs - {"outermost"} and len(found) == 4
    assert all("n" in symbols for symbols in found.values())
    # neither what an inner graph computes, nor what is computed later
    assert not any(symbols & {"in_branch", "later"} for symbols in found.values())
    # the two branches lie in the body, the condition and the body in the graph
    assert sorted("in_body" in symbols for symbols in found.values()) == [False, False, True, True]


def test_an_op_without_memory_belongs_to_the_host() -> None:
    backends = cpu_backends()
    ops_ = [op for op in nested().walk() if isinstance(op, MoOp)]
    assert {device_of(op, backends) for op in ops_} == {HOST}
    assert device_of(CodeOp.create(), backends) == HOST
    assert backend_of(ops_[0], backends) is backends[HOST]
