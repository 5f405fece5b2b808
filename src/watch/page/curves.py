"""Curves of a run: the points of any metrics, by step, tokens or time.

A long curve is thinned out to points that are there: of each stretch the first, the lowest and the highest.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cairn.run.jsonlines import Row
from cairn.run.metrics import number
from cairn.watch.overview import MATTERS, curves

Axis = Literal["step", "tokens", "time"]
AXES: tuple[Axis, ...] = ("step", "tokens", "time")
MOST_POINTS = 3000
"""Points of a curve, at most."""
MORE: Mapping[str, Sequence[tuple[str, str]]] = {
    "rl": [
        ("groups/unlearned", "prompts without spread"),
        ("rollout/cut_off", "cut off"),
        ("grad_norm", "gradient norm"),
        ("ratio/clipped", "clipped"),
        ("mismatch/kl", "mismatch kl"),
    ],
    "sft": [("grad_norm", "gradient norm"), ("lr", "learning rate")],
}
"""What is offered beside the metrics that matter, by the kind of run."""
HIDDEN = ("digest",)
"""Ends of names of columns that are no numbers."""


@dataclass(frozen=True)
class Points:
    """A curve: `xs` by the axis that was asked for, `steps` and `values` of each point.

    thinned: points of the same stretch that are left out.
    """

    key: str
    label: str
    steps: Sequence[int]
    xs: Sequence[float]
    values: Sequence[float]
    thinned: int


def axis_of(rows: Sequence[Row], axis: Axis) -> list[float]:
    """Where each row lies on an axis: its step, tokens that were trained on so far, or seconds of the run.

    Raises:
        ValueError: there is no such axis.
    """
    if axis == "step":
        return [float(row["step"]) for row in rows]
    if axis == "tokens":
        return _running(rows, "total_tokens", ("learned_tokens",))
    if axis == "time":
        return _running(rows, "run/wall_seconds", ("time/step", "time/wait"))
    raise ValueError(f"axis = {axis!r}: there are {', '.join(AXES)}")


def _running(rows: Sequence[Row], total: str, parts: Sequence[str]) -> list[float]:
    """A total that grows, from the rows that have it; else the sum of what each row adds."""
    found: list[float] = []
    before = 0.0
    for row in rows:
        value = number(row, total)
        if value is None or not math.isfinite(value):
            value = before + sum(number(row, part) or 0.0 for part in parts)
        before = max(value, before)
        found.append(before)
    return found


def keys_of(rows: Sequence[Row]) -> list[str]:
    """The metrics that any row has as a number, in the order of names."""
    known, found = set[str](), set[str]()
    for row in reversed(rows):
        for key in row.keys() - known:
            known.add(key)
            if key != "step" and number(row, key) is not None and not key.endswith(HIDDEN):
                found.add(key)
    return sorted(found)


def labels_of(command: str | None, rows: Sequence[Row]) -> dict[str, str]:
    """The curves that matter for a run of this command, most important first, and what they are called."""
    found = {curve.key: curve.label for curve in curves(command, rows)}
    kind = "rl" if MATTERS.get(command or "", ()) == MATTERS["rl"] else "sft"
    there = set(keys_of(rows))
    return found | {key: label for key, label in MORE[kind] if key in there and key not in found}


def points_of(
    rows: Sequence[Row],
    keys: Sequence[str],
    axis: Axis,
    *,
    first: float | None = None,
    last: float | None = None,
    labels: Mapping[str, str] | None = None,
    most: int = MOST_POINTS,
) -> list[Points]:
    """The curves of these metrics, between two places on the axis; metrics that no row has are left out."""
    xs = axis_of(rows, axis)
    within = [
        (x, row)
        for x, row in zip(xs, rows, strict=True)
        if (first is None or x >= first) and (last is None or x <= last)
    ]
    found: list[Points] = []
    for key in keys:
        points = [(x, row["step"], value) for x, row in within if (value := number(row, key)) is not None]
        if not points:
            continue
        few = thin(points, most)
        label = (labels or {}).get(key, key)
        found.append(
            Points(
                key,
                label,
                [step for _, step, _ in few],
                [x for x, _, _ in few],
                [value for _, _, value in few],
                len(points) - len(few),
            )
        )
    return found


def thin(points: Sequence[tuple[float, int, float]], most: int) -> list[tuple[float, int, float]]:
    """`most` points or fewer: of equal stretches the first, lowest and highest one, and the last of all."""
    if len(points) <= most:
        return list(points)
    count = max(most // 3, 1)
    bounds = [len(points) * place // count for place in range(count + 1)]
    chosen = {len(points) - 1}
    for begin, end in itertools.pairwise(bounds):
        stretch = [place for place in range(begin, end) if math.isfinite(points[place][2])]
        chosen.add(begin)
        if stretch:
            chosen.add(min(stretch, key=lambda place: points[place][2]))
            chosen.add(max(stretch, key=lambda place: points[place][2]))
    return [points[place] for place in sorted(chosen)]
