"""Groups ops into regions: one kernel each.

Ops are visited in program order. An element-wise op joins the group that produces one of its operands if both have the
same iteration space; a reduction or row-wise op joins if the group's values have its operand's shape. Groups whose
values meet in one op are merged. A join that would make two groups depend on each other is refused.

Ops that widen a narrow value, such as codes, move to the group that uses the wide one. Afterwards an element-wise group
that uses a matmul's result element by element becomes the matmul's epilogue; of a group that uses several of them, what
makes a narrow value of one is the epilogue of that one. An RMS norm that only a product by packed
weights uses is computed in the product's kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from xdsl.ir import Block, SSAValue

from max._compiler.analysis.shapes import is_view, shape_of, strip
from max._compiler.codegen.expressions import KERNEL_NAME
from max._compiler.mok import ProductsOp
from max._compiler.passes.base import ops_of
from max._compiler.passes.groups import Group, covers, keeps_places, one_nest
from max._compiler.passes.materialize import base_of
from max._compiler.passes.outline import Unit, computed_sizes, rebuild, size_dependencies
from max.dtype import DType
from max.mlir import MoOp, ShapedType
from max.mlir.ops.normalization import RmsNormOp
from max.mlir.sizes import Sizes

__all__ = ["fuse"]

MAX_OPS = 96
"""The largest size of a region, in element-wise ops; ops over rows count as several."""

MAX_WIDENING = 6
"""The most ops that widen a value and move to its user."""


def fusable(op: MoOp) -> bool:
    """Whether an op can be part of a region: element-wise or row-wise, on dtypes that the code generator has."""
    return (op.spec.row_flops > 0 or op.spec.elementwise) and all(
        _dtype(value) in KERNEL_NAME for value in (*op.operands, *op.results)
    )


def _dtype(value: SSAValue) -> DType:
    assert isinstance(value.type, ShapedType)
    return value.type.dtype


def _space(op: MoOp) -> tuple[Sizes, int]:
    """The iteration space of an op, and the place of its reduction axis."""
    if not op.spec.row_flops:
        return strip(shape_of(op.results[0])), -1
    shape = shape_of(op.operands[0])
    axis: int = op.attr_or("axis", len(shape) - 1)
    return strip(shape, axis), len(strip(shape[:axis]))


def product_of_norm(op: MoOp) -> MoOp | None:
    """The only user of an RMS norm, if it is a product whose kernel can compute the norm; else None."""
    if type(op) is not RmsNormOp or any(is_view(v.owner) for v in op.operands):
        return None
    user = op.results[0].get_user_of_unique_use()
    return user if isinstance(user, MoOp) and user.spec.takes_norm else None


class Fuser:
    """Groups the ops of one block."""

    def __init__(self, block: Block) -> None:
        self.ops = ops_of(block)
        self.position = {op: i for i, op in enumerate(self.ops)}
        self.group_of: dict[object, Group] = {}
        self.norms = {user: op for op in self.ops if (user := product_of_norm(op)) is not None}
        """The norm that a product's kernel computes, by product."""
        self.epilogues: dict[MoOp, list[Group]] = {}
        """The groups that are epilogues of one op with several results: one launch waits for the operands of all."""
        self.begins = list(range(len(self.ops)))
        """For each position the first one of all launches that go on beyond it."""
        self.sizes = computed_sizes(block, self.ops)
        """The symbols that the program computes, with the ops that do."""
        self.needed_sizes: dict[MoOp, set[MoOp]] = {}

    def find(self, op: object) -> Group | None:
        """The group that an op belongs to, after merges."""
        group = self.group_of.get(op)
        return group and group.root()

    def member(self, value: SSAValue) -> Group | None:
        """The group that produces a value, seen through views that keep each element in its place."""
        chain: list[MoOp] = []
        while is_view(owner := value.owner):
            assert isinstance(owner, MoOp)
            chain.append(owner)
            value = owner.operands[0]
        group = self.find(value.owner)
        if group is None or all(keeps_places(view, group.axis) for view in chain):
            return group
        return None

    # joining -----------------------------------------------------------------------------------

    def run(self) -> list[Group]:
        groups: list[Group] = []
        norms = set(self.norms.values())
        for op in self.ops:
            if op in norms or not fusable(op):
                continue
            space, axis = _space(op)
            chosen: Group | None = None
            for operand in op.operands:
                group = self.member(operand)
                if group is None or group is chosen:
                    continue
                if chosen is None:
                    if self.fits(op, group, space, axis) and not self.depends_on(op, group):
                        chosen = group
                elif self.compatible(chosen, group) and not self.would_cycle(chosen, group, op):
                    chosen = self.merge(chosen, group)
            if chosen is None:
                chosen = Group([], space, axis)
                groups.append(chosen)
            elif chosen.axis < 0:
                # an element-wise group leaves out an axis of size 1
                chosen.axis, chosen.space = axis, space
            chosen.ops.append(op)
            self.launched_together(chosen.ops)
            self.group_of[op] = chosen
        found = [group for group in groups if group.merged_into is None]
        self.move_widenings(found)
        return found

    def fits(self, op: MoOp, group: Group, space: Sizes, axis: int) -> bool:
        """Whether an op runs over a group's iteration space."""
        if group.size >= MAX_OPS:
            return False
        # an op on the results of reductions: one value a row
        per_row = axis < 0 <= group.axis and space == group.row_space()
        return (per_row or one_nest(space, axis, group)) and self.uses_in_place(op, group)

    def uses_in_place(self, op: MoOp, group: Group) -> bool:
        """Whether the op uses the operands that the group produces in place: element by element, or as rows."""
        data = op.operands[:1] if op.spec.row_flops else op.operands
        return all(value in data for value in op.operands if self.member(value) is group)

    def compatible(self, a: Group, b: Group) -> bool:
        """Whether two groups can be one region."""
        return a.size + b.size <= MAX_OPS and one_nest(a.space, a.axis, b)

    def merge(self, a: Group, b: Group) -> Group:
        """Merges `b` into `a`."""
        if a.axis < 0 and b.axis >= 0:
            a.axis, a.space = b.axis, b.space
        a.ops.extend(b.ops)
        self.launched_together(a.ops)
        b.merged_into = a
        return a

    # cycles ------------------------------------------------------------------------------------

    def reaches(self, starts: list[MoOp], targets: Set[object], first: int) -> bool:
        """Whether any of the ops is in, or depends on, one of the targets: groups, or ops with several epilogues.

        Args:
            starts: The ops.
            targets: The targets.
            first: The position of the first target's first op.
        """
        todo, visited = list(starts), set[object]()
        lowest = self.first_reaching(first)
        while todo:
            op = todo.pop()
            # ops before it cannot depend on a target
            if self.position[op] < lowest:
                continue
            unit = self.find(op) or op
            if unit in targets:
                return True
            if unit in visited:
                continue
            visited.add(unit)
            if isinstance(unit, Group):
                members = unit.ops
            else:
                # a product depends on the operands of all its epilogues
                members = [op, *[m for group in self.epilogues.get(op, ()) for m in group.ops]]
            todo.extend(o for m in members for v in m.operands if isinstance(o := v.owner, MoOp))
            if self.sizes:
                todo.extend(o for m in members for o in self.sizes_of(m))
        return False

    def sizes_of(self, op: MoOp) -> set[MoOp]:
        """The ops that compute the sizes that an op needs."""
        if op not in self.needed_sizes:
            self.needed_sizes[op] = size_dependencies(op, self.sizes)
        return self.needed_sizes[op]

    def first_reaching(self, index: int) -> int:
        """The first position whose op may depend on an op at `index`: a launch waits for the operands of all its
        ops, so values of an earlier one may depend on what comes later.
        """
        while self.begins[index] < index:
            index = self.begins[index]
        return index

    def launched_together(self, ops: Iterable[MoOp]) -> None:
        """Notes that ops become one launch."""
        positions = [self.position[op] for op in ops]
        first, last = min(positions), max(positions)
        for position in range(first, last):
            self.begins[position] = min(self.begins[position], first)

    def outside_owners(self, ops: list[MoOp], inside: set[Group]) -> list[MoOp]:
        """The producers of operands, and of sizes, from outside the groups."""
        owners = [
            owner
            for op in ops
            for value in op.operands
            if isinstance(owner := value.owner, MoOp) and self.member(value) not in inside
        ]
        if self.sizes:
            owners += [o for op in ops for o in self.sizes_of(op) if self.find(o) not in inside]
        return owners

    def depends_on(self, op: MoOp, group: Group) -> bool:
        """Whether an op depends on a group through ops outside of it."""
        return self.reaches(self.outside_owners([op], {group}), {group}, self.first_of(group))

    def would_cycle(self, a: Group, b: Group, *ops: MoOp) -> bool:
        """Whether merging two groups and further ops would make the result depend on itself."""
        pair = {a, b}
        starts = self.outside_owners([*a.ops, *b.ops, *ops], pair)
        return self.reaches(starts, pair, min(map(self.first_of, pair)))

    def first_of(self, group: Group) -> int:
        """The position of a group's first op."""
        return min(self.position[op] for op in group.ops)

    def move_widenings(self, groups: list[Group]) -> None:
        """Moves the ops that widen a narrow output of a group, such as codes, to the group that uses the wide value.

        The narrow value is written in any case; the wide one then is not, and the group may be an epilogue.
        """
        for group in groups:
            outputs = self.outputs_of(group) if group.axis < 0 else []
            narrow = min([_dtype(v).size_in_bytes for v in outputs], default=0)
            for value in outputs:
                if len(outputs) > 1 and _dtype(value).size_in_bytes > narrow:
                    self.move_widening(group, value, set(outputs))

    def outputs_of(self, group: Group) -> list[SSAValue]:
        """The values that ops outside of a group use."""
        inside = set(group.ops)
        return [
            v
            for op in group.ops
            for v in op.results
            if any(use.operation not in inside for use in v.uses)
        ]

    def move_widening(self, group: Group, value: SSAValue, outputs: set[SSAValue]) -> None:
        """Moves the ops between a narrow output and a wide one to the only group that uses the wide one."""
        users = {self.find(use.operation) for use in value.uses}
        target = users.pop()
        # a value with several readers would be widened in each of them
        if users or target is None or target is group or target.axis >= 0:
            return
        chain: list[MoOp] = []
        last = value
        while True:
            op = last.owner
            used = {use.operation for use in last.uses}
            if not isinstance(op, MoOp) or (chain and used != {chain[-1]}):
                return
            chain.append(op)
            inner = {v for v in op.operands if self.find(base_of(v).owner) is group}
            if len(inner) != 1 or len(chain) > MAX_WIDENING:
                return
            (last,) = inner
            if last in outputs and _dtype(last).size_in_bytes < _dtype(value).size_in_bytes:
                break
        added = sum(op.spec.region_size for op in chain)
        if not one_nest(group.space, -1, target) or target.size + added > MAX_OPS:
            return
        group.ops = [op for op in group.ops if op not in chain]
        target.ops = [*reversed(chain), *target.ops]
        for op in chain:
            self.group_of[op] = target
        self.launched_together(target.ops)

    def split_narrow(self, groups: list[Group]) -> list[Group]:
        """Takes from groups that read several products what makes a narrow value, such as codes, of one of them: as its
        epilogue, it writes the narrow value instead of sums. Returns the groups that were split off.
        """
        added: list[Group] = []
        for group in groups:
            if group.axis >= 0:
                continue
            products = sorted(
                {v.owner for op in group.ops for v in op.operands if _has_epilogue(v.owner)},
                key=lambda op: self.position[op],  # pyright: ignore[reportArgumentType]
            )
            # the last one has the rest of the group as its epilogue
            for product_ in products[:-1]:
                part = self.narrowing(group, product_) if isinstance(product_, MoOp) else []
                if part and len(part) < len(group.ops):
                    inside = set(part)
                    group.ops = [op for op in group.ops if op not in inside]
                    new = Group(part, group.space, -1)
                    self.group_of.update(dict.fromkeys(part, new))
                    added.append(new)
        return added

    def narrowing(self, group: Group, product_: MoOp) -> list[MoOp]:
        """The ops of a group that make a narrow value of a product and of nothing else that the group has."""
        inside = set(group.ops)
        own: set[MoOp] = set()
        part: list[MoOp] = []
        for op in sorted(group.ops, key=self.position.__getitem__):
            sources = {base_of(v).owner for v in op.operands}
            used = {o for o in sources if o in inside or _has_epilogue(o)}
            # it needs nothing of the product, or another product too
            if not used or not used <= {product_, *own}:
                continue
            own.add(op)
            narrow = min(_dtype(v).size_in_bytes for v in product_.results)
            if _dtype(op.results[0]).size_in_bytes >= narrow:
                continue
            needed = self.needed_of(op, own)
            inner = [v for o in {*needed, product_} - {op} for v in o.results]
            # no value in between is read elsewhere: it would have to be written as well
            if all(u.operation in needed for v in inner for u in v.uses):
                part = [o for o in own if o in needed]
        return sorted(part, key=self.position.__getitem__)

    def needed_of(self, op: MoOp, own: Set[MoOp]) -> set[MoOp]:
        """An op and those of some ops that its value is made of."""
        needed = {op}  # each op comes after those that it is made of
        for later in sorted(own, key=self.position.__getitem__, reverse=True):
            if later in needed:
                owners = {base_of(v).owner for v in later.operands}
                needed.update([o for o in own if o in owners])
        return needed

    def join_siblings(self, groups: list[Group]) -> list[Group]:
        """Merges groups over one space that read the same value, which is then loaded once.

        Only values as large as the space count: a shared bias gains nothing.
        """
        readers: dict[SSAValue, Group] = {}
        for group in groups:
            for op in group.ops:
                for value in op.operands:
                    base, current = base_of(value), group.root()
                    if self.find(base.owner) is current or not covers(base, group.space):
                        continue
                    first = readers.setdefault(base, current).root()
                    if first is current:
                        continue
                    if first.size + current.size > MAX_OPS:
                        # the first group is full: later groups may join this one
                        readers[base] = current
                    elif self.compatible(first, current) and not self.would_cycle(first, current):
                        self.merge(first, current)
        return [group for group in groups if group.merged_into is None]

    # epilogues ---------------------------------------------------------------------------------

    def attach_epilogues(self, groups: list[Group]) -> dict[Group, MoOp]:
        """The matmul of each group that can be its epilogue; of several matmuls the last one."""
        matmul_of: dict[Group, MoOp] = {}
        for group in groups:
            if group.axis >= 0:
                continue
            inside = set(group.ops)
            outputs = {
                v
                for op in group.ops
                for v in op.results
                if any(u.operation not in inside for u in v.uses)
            }
            # an epilogue replaces the one result of its product
            if len(outputs) != 1:
                continue
            matmuls = {
                v.owner
                for op in group.ops
                for v in op.operands
                if isinstance(v.owner, MoOp) and v.owner.spec.takes_epilogue
            }
            for matmul in sorted(matmuls, key=lambda m: self.position[m], reverse=True):  # pyright: ignore[reportArgumentType]
                assert isinstance(matmul, MoOp)
                if self.is_epilogue(matmul, group, inside):
                    matmul_of[group] = matmul
                    if isinstance(matmul, ProductsOp):
                        self.epilogues.setdefault(matmul, []).append(group)
                        self.launched_together([matmul, *group.ops])
                    break
        return matmul_of

    def is_epilogue(self, matmul: MoOp, group: Group, inside: set[MoOp]) -> bool:
        """Whether a group with one output contains all users of a matmul's results that it reads.

        All its ops have the shape of the output then: a view of a value in between would be another output.
        """
        used = [r for r in matmul.results if any(use.operation in inside for use in r.uses)]
        if not all(use.operation in inside for result in used for use in result.uses):
            return False
        if not isinstance(matmul, ProductsOp):
            # nothing else depends on the matmul, so that merging both cannot create a cycle
            return True
        numbers = tuple([result.index for result in used])
        starts = [op for op in self.outside_owners(group.ops, {group}) if op is not matmul]
        return numbers in matmul.parts and not self.reaches(starts, {matmul}, self.position[matmul])


def _has_epilogue(owner: object) -> bool:
    return (
        isinstance(owner, MoOp) and owner.spec.takes_epilogue and not isinstance(owner, ProductsOp)
    )


def fuse(block: Block) -> None:
    """Outlines groups of ops into `mok.region`; ops that cannot be fused stay as they are."""
    fuser = Fuser(block)
    groups = fuser.run()
    groups += fuser.split_narrow(groups)
    epilogues = fuser.attach_epilogues(groups)
    remaining = fuser.join_siblings([group for group in groups if group not in epilogues])
    joined: dict[MoOp, list[MoOp]] = {}
    for group, matmul in epilogues.items():
        ops = sorted(group.ops, key=fuser.position.__getitem__)
        joined.setdefault(matmul, [matmul]).extend(ops)
    for matmul, norm in fuser.norms.items():
        joined.setdefault(matmul, [matmul]).insert(0, norm)
    units = [Unit(ops, "library") for ops in joined.values()]
    for group in remaining:
        ops = sorted(group.ops, key=fuser.position.__getitem__)
        units.append(Unit(ops, "map" if group.axis < 0 else "rows"))
    rebuild(block, units)
