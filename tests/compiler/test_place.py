"""Which operands are copied to the device of an op; no other pass runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from max._backends import BackendOptions, Backends, backends_for
from max._compiler import mok
from max._compiler.lowering.lowered_graph import UnsupportedOpError
from max._compiler.mok import DeviceCopyOp
from max._compiler.passes.place import place_operands
from max.mlir import IfOp, ModuleOp, MoOp, WhileOp, graphs, verify_module
from max.mlir.ops.constant import TransferOp
from tests.devices.fake import fake_devices

GPU, HOST = "!mo.tensor<[], bool, gpu:0>", "!mo.tensor<[], bool, cpu:0>"
BUFFER = "!mo.buffer<[4], f32, cpu:0>"
X, Y = "!mo.tensor<[4], f32, cpu:0>", "!mo.tensor<[4], f32, gpu:0>"


@pytest.fixture
def backends() -> Iterator[Backends]:
    with fake_devices(1) as devices:
        yield backends_for(devices, BackendOptions())


def placed(text: str, backends: Backends) -> ModuleOp:
    module = mok.parse(f"builtin.module {{ {text} }}")
    verify_module(module)
    for graph in graphs(module):
        place_operands(graph.block, backends)
    verify_module(module)
    return module


def found(module: ModuleOp, kind: type[MoOp]) -> list[MoOp]:
    return [op for op in module.walk() if isinstance(op, kind)]


def branch(name: str) -> str:
    return f"mo.subgraph @{name}(%x: {X}) -> ({X}) {{ mo.output(%x) : ({X}) -> () }}\n"


@pytest.mark.parametrize("device", ["gpu:0", "cpu:1"])
def test_a_predicate_stays_where_it_is_computed(backends: Backends, device: str) -> None:
    """Whether its copy was one between memories or of devices that share theirs."""
    there = HOST.replace("cpu:0", device)
    module = placed(
        branch("a")
        + branch("b")
        + f"""mo.graph @g(%p: {there}, %x: {X}) -> ({X}) {{
            %q = mo.transfer(%p) : ({there}) -> {HOST}
            %y = mo.if(%q, %x) {{then = @a, otherwise = @b}} : ({HOST}, {X}) -> {X}
            mo.output(%y) : ({X}) -> () }}""",
        backends,
    )
    (op,) = found(module, IfOp)
    assert op.operands[0] is op.parent.args[0]  # pyright: ignore[reportOptionalMemberAccess]


def test_a_predicate_of_the_host_stays(backends: Backends) -> None:
    module = placed(
        branch("a")
        + branch("b")
        + f"""mo.graph @g(%p: {HOST}, %x: {X}) -> ({X}) {{
            %q = mo.not(%p) : ({HOST}) -> {HOST}
            %y = mo.if(%q, %x) {{then = @a, otherwise = @b}} : ({HOST}, {X}) -> {X}
            mo.output(%y) : ({X}) -> () }}""",
        backends,
    )
    (op,) = found(module, IfOp)
    assert isinstance(op.operands[0].owner, MoOp) and op.operands[0].owner.name == "mo.not"


def loop(other: str) -> str:
    """A loop whose condition copies its predicate from the accelerator, and another op."""
    return (
        branch("a")
        + f"""mo.subgraph @test(%x: {X}, %p: {GPU}) -> ({HOST}) {{
            %q = mo.transfer(%p) : ({GPU}) -> {HOST}
            mo.output(%q) : ({HOST}) -> () }}
        mo.subgraph @body(%x: {X}, %p: {GPU}) -> ({X}, {GPU}) {{ mo.output(%x, %p) : ({X}, {GPU}) -> () }}
        mo.graph @g(%x: {X}, %p: {GPU}) -> ({X}) {{
            %y, %r = mo.while(%x, %p) {{condition = @test, body = @body}} : ({X}, {GPU}) -> ({X}, {GPU})
            {other}
            mo.output(%y) : ({X}) -> () }}"""
    )


@pytest.mark.parametrize(
    ("other", "stays"),
    [
        ("", False),
        (f'%z = mo.call(%x) {{callee = @a, prefix = ""}} : ({X}) -> {X}', False),
        (f'%z = mo.call(%x, %p) {{callee = @test, prefix = ""}} : ({X}, {GPU}) -> {HOST}', True),
    ],
)
def test_the_predicate_of_a_loop(backends: Backends, other: str, stays: bool) -> None:
    """It stays where it is computed unless another op needs its copy."""
    module = placed(loop(other), backends)
    assert len(found(module, WhileOp)) == 1
    (condition,) = [graph for graph in graphs(module) if graph.sym_name == "test"]
    output = condition.block.last_op
    assert isinstance(output, MoOp)
    owner = output.operands[0].owner
    assert isinstance(owner, DeviceCopyOp) == stays and (stays or owner is condition.block)


STORE = """mo.graph @g(%x: X, %b: B) -> () {
    %c = mo.chain_create() : () -> !mo.chain
    %d = mo.custom(%x, %b, %c) {symbol = "s", parameters = {}, device = #mo.device<cpu:0>}
        : (X, B, !mo.chain) -> !mo.chain
    mo.output() : () -> () }"""


def test_what_a_buffer_takes_is_copied_to_its_device(backends: Backends) -> None:
    """The first result has no device, and the first operand is on another one."""
    module = placed(STORE.replace("X", Y).replace("B", BUFFER), backends)
    (copy,) = found(module, DeviceCopyOp)
    assert str(copy.results[0].type) == X
    (op,) = copy.results[0].uses
    assert isinstance(op.operation, MoOp) and op.operation.name == "mo.custom"


def test_a_transfer_in_one_memory_is_a_view(backends: Backends) -> None:
    there = X.replace("cpu:0", "cpu:1")
    text = f"""mo.graph @g(%x: {X}) -> ({there}) {{
        %y = mo.transfer(%x) : ({X}) -> {there}
        mo.output(%y) : ({there}) -> () }}"""
    module = placed(text, backends)
    assert len(found(module, TransferOp)) == 1 and not found(module, DeviceCopyOp)


def test_writes_to_the_copy_of_a_buffer_are_refused(backends: Backends) -> None:
    text = f"""mo.graph @g(%x: {Y}, %b: {BUFFER}) -> ({Y}) {{
        %c = mo.chain_create() : () -> !mo.chain
        %y, %d = mo.custom(%b, %x, %c) {{symbol = "s", parameters = {{}}, device = #mo.device<gpu:0>}}
            : ({BUFFER}, {Y}, !mo.chain) -> ({Y}, !mo.chain)
        mo.output(%y) : ({Y}) -> () }}"""
    with pytest.raises(UnsupportedOpError, match=r"mo.custom runs on .*gpu.*on its own device"):
        placed(text, backends)
