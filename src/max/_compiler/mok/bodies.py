"""The ops of the `mok` dialect with a body: `mok.region` and `mok.once`, see `max._compiler.mok`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from xdsl.ir import Attribute, Block, OpTraits, Region, SSAValue
from xdsl.traits import IsolatedFromAbove
from xdsl.utils.exceptions import VerifyException

from max.mlir import MoOp, OpSpec, to_attr

if TYPE_CHECKING:
    from xdsl.parser import Parser
    from xdsl.printer import Printer


class BodyOp(MoOp):
    """An op whose body uses its arguments only."""

    traits = OpTraits(lambda: (IsolatedFromAbove(),))

    @classmethod
    def make(
        cls,
        inputs: Sequence[SSAValue],
        results: Sequence[Attribute],
        body: Block,
        attrs: dict[str, Any],
    ) -> BodyOp:
        """The op with a finished body."""
        attributes = {key: to_attr(value) for key, value in attrs.items()}
        return cls.create(
            operands=inputs, result_types=results, attributes=attributes, regions=[Region(body)]
        )

    @property
    def block(self) -> Block:
        """The body."""
        return self.regions[0].block

    @property
    def results_in_body(self) -> tuple[SSAValue, ...]:
        """The values that the body yields, one per result."""
        last = self.block.last_op
        assert last is not None
        return tuple(last.operands)

    def verify_(self) -> None:
        """Checks that the body takes the types of the operands, yields the types of the results, and uses no other
        values.
        """
        super().verify_()
        block = self.block
        if [a.type for a in block.args] != [v.type for v in self.operands]:
            raise VerifyException("the body's arguments differ from the operands")
        last = block.last_op
        assert last is not None, "a block without a terminator is refused before"
        if last.name != "mok.yield":
            raise VerifyException("the body does not end with mok.yield")
        if [v.type for v in self.results_in_body] != [v.type for v in self.results]:
            raise VerifyException("the yielded values differ from the results")
        # program order: an operand is an argument or the result of an op above
        known = set[SSAValue](block.args)
        for op in block.ops:
            if not known.issuperset(op.operands):
                raise VerifyException(
                    f"{op.name} has an operand from outside the body, or one that is computed after it"
                )
            known.update(op.results)

    def print(self, printer: Printer) -> None:
        """Prints `(operands) attributes : type region`."""
        with printer.in_parens():
            printer.print_list(self._operands, printer.print_operand)
        printer.print_op_attributes(self.attributes)
        printer.print_string(" : ")
        printer.print_operation_type(self)
        printer.print_string(" ")
        printer.print_region(self.regions[0])

    @classmethod
    def parse(cls, parser: Parser) -> BodyOp:
        """Parses the form that `print` writes."""
        operands = parser.parse_op_args_list()
        attributes = parser.parse_optional_attr_dict()
        parser.parse_punctuation(":")
        position = parser.pos
        types = parser.parse_function_type()
        region = parser.parse_region()
        return cls.create(
            operands=parser.resolve_operands(operands, types.inputs.data, position),
            result_types=types.outputs.data,
            attributes=attributes,
            regions=[region],
        )


class RegionOp(BodyOp):
    """A group of ops that are computed together, mostly by one kernel."""

    name = "mok.region"
    spec = OpSpec(
        # not pure: equal ops are merged without a look at their bodies
        "mok.region",
        (0, None),
        None,
        attributes={"kind": str},
        pure=False,
    )

    @property
    def kind(self) -> str:
        """``map``, ``rows`` or ``library``."""
        return self.attr("kind")


class OnceOp(BodyOp):
    """Ops on weights and constants, computed once when a model is loaded."""

    name = "mok.once"
    spec = OpSpec("mok.once", (0, None), None, pure=False, borrows=True)
