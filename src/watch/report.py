"""A run as one HTML file that needs nothing else: what is wrong, curves, time, checkpoints and answers.

The file has no script and loads nothing, so it can be mailed, archived and opened anywhere. Text from the
run is escaped.
"""

import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, Manifest, age_of
from cairn.checkpoint.step_folder import StepFolders
from cairn.orchestrator.rollout_log import KeptRollouts
from cairn.run.errors import UsageError
from cairn.run.files import DamagedFile
from cairn.run.output import counted, duration, printable, pyplot
from cairn.run.view import RunView
from cairn.watch.goodput import (
    account_rows,
    phase_rows,
    sentence,
    time_account,
    token_rows,
    token_sentence,
    tokens_of,
)
from cairn.watch.overview import Curve, Overview, overview, scaled
from cairn.watch.page.curves import thin

WIDTH, HEIGHT = 840, 300
"""Size of a curve in pixels."""
MARGIN = 72
"""Pixels left of a curve and below it, for its scales."""
MOST_POINTS = 400
"""Points of a curve that are drawn."""
LARGEST = 1e300
"""Values from here on, infinity and NaN are left out of a curve, since it could not be drawn with them."""
ANSWERS = 3
"""Best, worst and failed answers that are shown, of each kind."""
LONGEST = 4000
"""Characters of a text that are shown."""

STYLE = """
:root { color-scheme: light dark;
  --ink: #222; --soft: #666; --line: #2a6f97; --paper: #fff; --rule: #ddd; --bad: #a33; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --soft: #999; --line: #6cb4dd; --paper: #16181b; --rule: #333; --bad: #e88; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1000px;
  margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.4em; overflow-wrap: anywhere; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; margin-bottom: 1em; }
td, th { padding: 2px 12px 2px 0; text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
tr + tr td { border-top: 1px solid var(--rule); }
ol.wrong li { margin-bottom: .6em; } ol.wrong b { color: var(--bad); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: .6em; border-radius: 4px;
  background: color-mix(in srgb, var(--rule) 40%, transparent); }
svg { max-width: 100%; height: auto; } svg text { fill: var(--soft); font: 18px system-ui, sans-serif; }
svg path { fill: none; stroke: var(--line); stroke-width: 1.5; } svg line { stroke: var(--rule); }
figure { display: inline-block; margin: 0 1em 1em 0; } figcaption { font-weight: 600; }
.soft { color: var(--soft); }
"""


def report(view: RunView, name: str) -> str:
    """The whole page; `name`: the run's directory as the user knows it.

    Raises:
        DamagedFile: metrics.jsonl or history.jsonl as a whole can't be read.
    """
    shown = overview(view, here=name)
    parts = [
        *_head(shown, name),
        *_findings(shown),
        *_curves(shown.curves),
        *_time(view),
        *_checkpoints(view.checkpoints()),
        *_evaluations(view),
        *_answers(KeptRollouts(view.run.rollouts)),
        *_settings(view),
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape(name)}</title><style>{STYLE}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _head(shown: Overview, name: str) -> Iterator[str]:
    yield f"<h1>{escape(name)}</h1>"
    of = f" of {shown.max_steps}" if shown.max_steps else ""
    facts = [shown.command or "run", shown.state, f"step {shown.step}{of}"]
    if shown.pace is not None:
        facts.append(f"{shown.pace:.3g} s a step")
    if shown.restarts:
        facts.append(f"{counted(shown.restarts, 'restart')}, {counted(shown.recomputed, 'step')} recomputed")
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    yield f"<p>{escape(', '.join(facts))} <span class='soft'>(report of {made})</span></p>"
    if shown.resume:
        yield f"<p>Go on with: <code>{escape(shown.resume)}</code></p>"


def _findings(shown: Overview) -> Iterator[str]:
    yield "<h2>What is wrong</h2>"
    if not shown.findings:
        yield "<p>Nothing, by any of the rules.</p>"
        return
    items = (f"<li><b>{escape(one.what)}.</b> {escape(one.advice)}.</li>" for one in shown.findings)
    yield f"<ol class='wrong'>{''.join(items)}</ol>"


def _curves(curves: Sequence[Curve]) -> Iterator[str]:
    drawn = [(curve, svg) for curve in curves if (svg := draw(curve))]
    if drawn:
        yield "<h2>Curves</h2>"
    for curve, svg in drawn:
        caption = (
            f"<figcaption>{escape(curve.label)} <span class='soft'>{curve.newest:.4g}</span></figcaption>"
        )
        yield f"<figure>{caption}{svg}</figure>"


def draw(curve: Curve) -> str:
    """A curve as SVG; empty if it has fewer than two points."""
    known = [(float(step), step, value) for step, value in curve.points if abs(value) < LARGEST]
    points = [(step, value) for _, step, value in thin(known, MOST_POINTS)]
    if len(points) < 2:
        return ""
    low, high = scaled(value for _, value in points)
    first, last = points[0][0], points[-1][0]
    digits = 3 + math.ceil(max(math.log10(max(abs(low), abs(high)) / (high - low)), 0.0))

    def place(step: float, value: float) -> str:
        x = MARGIN + (step - first) / (last - first) * (WIDTH - MARGIN - 8)
        y = 8 + (high - value) / (high - low) * (HEIGHT - 40)
        return f"{x:.1f},{y:.1f}"

    path = "M" + "L".join(place(step, value) for step, value in points)
    bottom = HEIGHT - 32
    scale = [
        f"<line x1='{MARGIN}' y1='{y}' x2='{WIDTH}' y2='{y}'/>"
        f"<text x='{MARGIN - 4}' y='{y + 4}' text-anchor='end'>{value:.{digits}g}</text>"
        for y, value in ((8, high), (bottom, low))
    ]
    scale += [
        f"<text x='{MARGIN}' y='{HEIGHT - 6}'>step {first:g}</text>",
        f"<text x='{WIDTH - 8}' y='{HEIGHT - 6}' text-anchor='end'>{last:g}</text>",
    ]
    label = escape(f"{curve.key} over {len(curve.points)} steps", quote=True)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH // 2}" role="img" aria-label="{label}">'
        f"{''.join(scale)}<path d='{path}'/></svg>"
    )


def draw_pngs(curves: Sequence[Curve], folder: Path) -> Iterator[Path]:
    """Write each curve to a PNG file of its name, with `/` as `_`.

    Raises:
        UsageError: the package that draws them is not installed.
    """
    plot = pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    for curve in curves:
        figure, axes = plot.subplots(figsize=(6.4, 3.6))
        axes.plot([step for step, _ in curve.points], [value for _, value in curve.points])
        axes.set(xlabel="step", ylabel=printable(curve.key))
        if finite := [value for _, value in curve.points if math.isfinite(value)]:
            low, high = scaled(finite)
            margin = (high - low) / 20
            axes.set_ylim(low - margin, high + margin)
        path = folder / (re.sub(r"[^A-Za-z0-9.-]", "_", curve.key) + ".png")
        figure.savefig(path, dpi=150, bbox_inches="tight")
        plot.close(figure)
        yield path


def _time(view: RunView) -> Iterator[str]:
    account = time_account(view.metrics(), view.history(), view.costs())
    yield f"<h2>Time</h2><p>{escape(sentence(account))}</p>"
    if rows := account_rows(account):
        yield _table(["time", "how long", "share", "what it is"], rows)
    if rows := phase_rows(view.spans()):
        yield _table(["role", "what it did", "how long", "share"], rows)
    tokens = tokens_of(view)
    yield f"<h2>Tokens</h2><p>{escape(token_sentence(tokens))}</p>"
    if rows := token_rows(tokens):
        yield _table(["tokens", "how many", "share", "what it is"], rows)


def _checkpoints(folder: Path) -> Iterator[str]:
    folders = StepFolders(folder)
    rows: list[list[object]] = []
    try:
        steps = folders.steps()
    except (UsageError, OSError):
        return
    for step in steps:
        try:
            manifest: Manifest = folders.manifest(step)
        except CheckpointError as error:
            rows.append([step, "", "", str(error)])
            continue
        age = age_of(manifest.created)
        ago = "" if age is None else f"{duration(age)} ago"
        rows.append([step, manifest.branch, ago, f"{manifest.nbytes / 1e6:,.1f} MB"])
    if rows:
        yield f"<h2>Checkpoints</h2><p class='soft'>{escape(str(folder))}</p>"
        yield _table(["step", "branch", "saved", "size"], rows)


def _evaluations(view: RunView) -> Iterator[str]:
    try:
        rows = view.evals()
    except DamagedFile as error:
        yield f"<h2>Evaluations</h2><p>{escape(str(error))}</p>"
        return
    cells = [
        [row.get("step", ""), row.get("name", ""), _number(row.get("reward", row.get("loss")))]
        for row in rows
    ]
    if cells:
        yield "<h2>Evaluations</h2>" + _table(["step", "name", "reward or loss"], cells)


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) and not isinstance(value, bool) else ""


def _answers(kept: KeptRollouts) -> Iterator[str]:
    """The best, the worst and the failed answers of the newest step that is kept."""
    for step in reversed(kept.steps()):
        try:
            rows = kept.read(step, ["place", "sample", "problem", "prompt", "text", "reward", "failed"])
        except DamagedFile:
            continue
        rated = sorted((row for row in rows if row["reward"] is not None), key=lambda row: -row["reward"])
        kinds = {
            "best": rated[:ANSWERS],
            "worst": rated[::-1][:ANSWERS] if len(rated) > ANSWERS else [],
            "failed": [row for row in rows if row["failed"] is not None][:ANSWERS],
        }
        yield f"<h2>Answers of step {step}</h2>"
        for kind, chosen in kinds.items():
            for row in chosen:
                rate = f"failed: {row['failed']}" if row["reward"] is None else f"reward {row['reward']:.4g}"
                about = f"{kind}: {step}/{row['place']}/{row['sample']}, problem {row['problem']}, {rate}"
                yield f"<p>{escape(_short(about))}</p><pre>{escape(_short(row['prompt'] or ''))}</pre>"
                yield f"<pre>{escape(_short(row['text'] or ''))}</pre>"
        return


def _short(text: str) -> str:
    left_out = len(text) - LONGEST
    return text if left_out <= 0 else f"{text[:LONGEST]} [... {left_out} characters left out ...]"


def _settings(view: RunView) -> Iterator[str]:
    try:
        config: Mapping[str, Any] | None = view.config()
    except DamagedFile:
        config = None
    if config:
        text = escape(json.dumps(config, indent=2))
        yield f"<h2>Settings</h2><details><summary>config.json</summary><pre>{text}</pre></details>"


def _table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: object) -> str:
    number = isinstance(value, int | float)
    return f"<td{' class=number' if number else ''}>{escape(str(value))}</td>"
