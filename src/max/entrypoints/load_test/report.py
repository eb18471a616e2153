"""The table and the plot of a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

_TIMES = {
    "ttft_ms": "time to first token, ms",
    "itl_ms": "time between tokens, ms",
    "tpot_ms": "time per token after the first, ms",
    "latency_ms": "time of a request, ms",
}


def table(run: dict[str, Any]) -> str:
    """The numbers of a run as text.

    Args:
        run: What ``summary`` gives.
    """
    rows = [
        ("request rate, 1/s", f"{run['request_rate']}"),
        ("requests, completed and failed", f"{run['completed']}, {run['failed']}"),
        ("duration, s", f"{run['duration_s']:.2f}"),
        ("requests, 1/s", f"{run['request_throughput']:.2f}"),
        ("generated tokens, 1/s", f"{run['output_throughput']:.1f}"),
        ("all tokens, 1/s", f"{run['total_token_throughput']:.1f}"),
        ("tokens, of prompts and generated", f"{run['total_input_tokens']}, {run['total_output_tokens']}"),
    ]  # fmt: skip
    lines = [f"{name:<36}{value:>12}" for name, value in rows]
    lines.append(f"{'':<36}" + "".join(f"{each:>10}" for each in ("mean", "median", "p90", "p99")))
    for key, name in _TIMES.items():
        if spread := run[key]:
            values = "".join(f"{spread[each]:>10.1f}" for each in ("mean", "median", "p90", "p99"))
            lines.append(f"{name:<36}{values}")
    lines += [f"failed {count} times: {error}" for error, count in run["errors"].items()]
    return "\n".join(lines)


def plot(runs: Sequence[dict[str, Any]], title: str) -> str:
    """Throughput against the median and the 99th percentile of latency, as an SVG.

    Args:
        runs: The runs, one a rate.
        title: The title.
    """
    width, height, left, bottom, top = 640, 400, 70, 50, 40
    shown = [run for run in runs if run["latency_ms"]]
    most_x = max((run["output_throughput"] for run in shown), default=1) * 1.1
    most_y = max((run["latency_ms"]["p99"] for run in shown), default=1) * 1.1

    def place(x: float, y: float) -> str:
        right, high = width - left - 20, height - bottom - top
        return f"{left + x / most_x * right:.1f},{height - bottom - y / most_y * high:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="22" font-size="15">{escape(title)}</text>',
        f'<path d="M{left},{top} V{height - bottom} H{width - 20}" fill="none" stroke="#444"/>',
        f'<text x="{width / 2}" y="{height - 12}" text-anchor="middle">generated tokens a second</text>',
        f'<text x="16" y="{height / 2}" text-anchor="middle" transform="rotate(-90 16 {height / 2})">'
        "time of a request, ms</text>",
    ]
    for step in range(1, 5):
        x, y = most_x * step / 4, most_y * step / 4
        at_x, at_y = place(x, 0).split(","), place(0, y).split(",")
        parts.append(
            f'<text x="{at_x[0]}" y="{height - bottom + 16}" text-anchor="middle">{x:.0f}</text>'
        )
        parts.append(f'<text x="{left - 6}" y="{at_y[1]}" text-anchor="end">{y:.0f}</text>')
    for key, color in (("median", "#0b62c4"), ("p99", "#b3261e")):
        points = [(run["output_throughput"], run["latency_ms"][key]) for run in shown]
        line = " ".join(place(*point) for point in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        for point in points:
            x, y = place(*point).split(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{color}"/>')
        label_y = top + (14 if key == "median" else 30)
        parts.append(f'<text x="{left + 12}" y="{label_y}" fill="{color}">{key}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
