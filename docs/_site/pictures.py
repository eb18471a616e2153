"""The pictures of docs/how-it-works.md, drawn from the compiler's passes over a small model.

``python docs/_site/pictures.py`` writes docs/images: each picture in colors for a light and a dark page.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xdsl.ir import Operation, SSAValue

from max._compiler import mok
from max.dtype import DType
from max.engine.explain import explain_graph
from max.graph import DeviceRef, Graph, TensorType, Weight, ops
from max.mlir import entry

FOLDER = Path(__file__).parents[1] / "images"
# the picture's name and the pass after which the module is drawn
STAGES = {
    "staged": "as staged",
    "simplified": "drop-dead-ops",
    "packed": "compute-once",
    "fused": "drop-dead-views",
}
THEMES = {
    "light": {
        "ink": "#1f2330",
        "line": "#8a90a2",
        "op": "#e8ebf7",
        "weight": "#fdf1d6",
        "load": "#dff2e4",
    },
    "dark": {
        "ink": "#e3e6ef",
        "line": "#8f96ab",
        "op": "#2d3350",
        "weight": "#4a3f22",
        "load": "#23402d",
    },
}
ROW, GAP, LINE, CHAR, PAD = 30, 22, 17, 7.4, 12


def model() -> Graph:
    """A gated MLP block: norm, two products, silu, a product back, residual, softmax."""
    device = DeviceRef.CPU()
    with Graph("block", input_types=[TensorType(DType.float32, ["n", 64], device)]) as graph:
        x = graph.inputs[0].tensor
        scale = Weight("scale", DType.float32, [64], device)
        gate = Weight("gate", DType.float32, [128, 64], device)
        up = Weight("up", DType.float32, [128, 64], device)
        down = Weight("down", DType.float32, [64, 128], device)
        h = ops.rms_norm(x, scale, 1e-6)
        gated = ops.silu(h @ ops.transpose(gate, 0, 1)) * (h @ ops.transpose(up, 0, 1))
        y = gated @ ops.transpose(down, 0, 1)
        graph.output(ops.softmax(x + y * 2.0))
    return graph


@dataclass
class Box:
    """A box of a picture.

    Attributes:
        lines: Its text.
        kind: What it holds: ``op``, ``weight`` or ``load``, its color; ``bend`` for a point of a long edge.
        sources: The boxes that it reads.
        rank: The row it stands in.
        x: The left edge.
        y: The upper edge.
        tall: The height of the row.
    """

    lines: list[str]
    kind: str
    sources: list[Box] = field(default_factory=list)
    rank: int = 0
    x: float = 0.0
    y: float = 0.0
    tall: float = 0.0

    @property
    def width(self) -> float:
        if self.kind == "bend":
            return 6.0
        return max(len(line) for line in self.lines) * CHAR + 2 * PAD

    @property
    def height(self) -> float:
        if self.kind == "bend":
            return self.tall
        return len(self.lines) * LINE + PAD


def boxes_of(text: str) -> list[Box]:
    """The boxes of a module: one for each input, op, region and computation at load."""
    graph = entry(mok.parse(text))
    fused = any(op.name == "mok.region" for op in graph.block.ops)
    boxes: list[Box] = []
    makers: dict[SSAValue, Box] = {}
    for argument in graph.block.args:
        makers[argument] = Box(["x"], "weight")
        boxes.append(makers[argument])
    for op in graph.block.ops:
        if op.name == "mo.output":
            box = Box(["output"], "weight")
        elif op.name == "mo.constant.external":
            box = Box([f"weight {_text_of(op, 'name')}"], "weight")
        elif op.name == "mo.constant":
            box = Box(["constant"], "weight")
        elif op.regions:
            inner = [
                o.name.partition(".")[2] for o in op.regions[0].block.ops if o.name != "mok.yield"
            ]
            title = "once, at load" if op.name == "mok.once" else "kernel"
            box = Box([f"{title}:", *_counted(inner)], "load" if op.name == "mok.once" else "op")
        else:
            name = op.name.partition(".")[2]
            # after fusion an op outside a region is a launch of its own
            box = Box(["kernel:", name] if fused else [name], "op")
        for operand in op.operands:
            source = makers[operand]
            if source not in box.sources:
                box.sources.append(source)
        for result in op.results:
            makers[result] = box
        boxes.append(box)
    return boxes


def _text_of(op: Operation, name: str) -> str:
    attribute: Any = op.properties.get(name) or op.attributes.get(name)
    return str(attribute.data)


def _counted(names: list[str]) -> Iterator[str]:
    for name in dict.fromkeys(names):
        count = names.count(name)
        yield name if count == 1 else f"{name} ×{count}"


def place(boxes: list[Box]) -> tuple[float, float]:
    """Gives each box its place, and adds a bend to `boxes` for each row that an edge passes.

    A row of a box is the longest path from the model's input; what does not depend on the input stands right above
    its first reader.

    Returns:
        The width and the height of the picture.
    """
    dynamic = {id(boxes[0])}
    for box in boxes:
        box.rank = 1 + max((s.rank for s in box.sources), default=-1)
        if any(id(s) in dynamic for s in box.sources):
            dynamic.add(id(box))
    for box in reversed(boxes):
        readers = [b.rank for b in boxes if box in b.sources]
        if readers and id(box) not in dynamic:
            box.rank = min(readers) - 1
    lowest = min(b.rank for b in boxes)
    for box in boxes:
        box.rank -= lowest
    _add_bends(boxes)
    rows: list[list[Box]] = [[] for _ in range(max(b.rank for b in boxes) + 1)]
    for box in boxes:
        rows[box.rank].append(box)
    y = float(PAD)
    for row in rows:
        # below the middle of what each box reads; without sources in the order of the module
        row.sort(key=lambda b: _middle(b.sources) if b.sources else b.x)
        x = 0.0
        for box in row:
            box.x, box.y = x, y
            x += box.width + GAP
        tall = max(b.height for b in row)
        for box in row:
            box.tall = tall  # a bend passes its whole row
        y += tall + ROW
    width = max(b.x + b.width for b in boxes)
    for row in rows:
        # rows are centered
        shift = (width - (row[-1].x + row[-1].width)) / 2 + PAD
        for box in row:
            box.x += shift
    return width + 2 * PAD, y - ROW + PAD


def _middle(boxes: list[Box]) -> float:
    return sum(b.x + b.width / 2 for b in boxes) / len(boxes)


def _add_bends(boxes: list[Box]) -> None:
    for box in list(boxes):
        for number, source in enumerate(box.sources):
            for rank in range(source.rank + 1, box.rank):
                source = Box([""], "bend", [source], rank)
                boxes.append(source)
            box.sources[number] = source


def drawing(boxes: list[Box], theme: str) -> str:
    """The boxes as SVG."""
    width, height = place(boxes)
    colors = THEMES[theme]
    parts: list[str] = []
    for box in boxes:
        for source in box.sources:
            x0, y0 = source.x + source.width / 2, source.y + source.height
            x1, y1 = box.x + box.width / 2, box.y
            bend = (y0 + y1) / 2
            parts.append(
                f'<path d="M{x0:.1f} {y0:.1f} C{x0:.1f} {bend:.1f} {x1:.1f} {bend:.1f} {x1:.1f} {y1:.1f}" '
                f'fill="none" stroke="{colors["line"]}" stroke-width="1.2"/>'
            )
    for box in boxes:
        if box.kind == "bend":
            x = box.x + box.width / 2
            parts.append(
                f'<path d="M{x:.1f} {box.y:.1f} V{box.y + box.height:.1f}" stroke="{colors["line"]}" '
                'stroke-width="1.2"/>'
            )
            continue
        parts.append(
            f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="6" '
            f'fill="{colors[box.kind]}" stroke="{colors["line"]}"/>'
        )
        for number, line in enumerate(box.lines):
            parts.append(
                f'<text x="{box.x + box.width / 2:.1f}" y="{box.y + PAD / 2 + 13 + number * LINE:.1f}" '
                f'text-anchor="middle" fill="{colors["ink"]}">{html.escape(line)}</text>'
            )
    return _svg(width, height, parts)


def _svg(width: float, height: float, parts: list[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="ui-monospace, monospace" font-size="12">\n{body}\n</svg>\n'
    )


def pictures() -> dict[str, str]:
    """The text of each picture by file name."""
    told = explain_graph(model())
    texts = {kept["name"]: kept["text"] for kept in told["passes"]}
    result: dict[str, str] = {}
    for theme in THEMES:
        for name, last in STAGES.items():
            result[f"{name}-{theme}.svg"] = drawing(boxes_of(texts[last]), theme)
    return result


def main() -> None:
    """Writes the pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
