# Unchecked values have no static types.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""Renders `--help`: every setting with its default, most used first. The site's reference has the same."""

import os
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from cairn.config.settings import Setting
from cairn.config.shared import SupervisionConfig

FIRST = (
    "model", "data", "environment", "orchestrator.environment", "", "optimizer", "scheduler", "ckpt",
    "orchestrator", "orchestrator.sampling", "trainer", "trainer.optimizer", "trainer.scheduler", "sampling",
    "trainer.loss", "trainer.precision", "loss", "precision", "wandb", "trainer.wandb", "sinks",
    "sinks.tensorboard", "sinks.csv", "sinks.prometheus", "sinks.trackio", "sinks.webhook", "sinks.command",
)  # fmt: skip
"""Order of sections; "" holds the top-level settings. Other sections come after these, before LAST."""
LAST = ("inference", "ray", "supervision")
"""Sections shown last. `supervision` is no section of a file: its settings are top-level, but rarely set."""
LEADING = (
    "max_steps", "output_dir", "seed", "host", "port", "workers", "seq_len", "micro_batch_size",
    "inference_url", "prompts_per_step", "samples_per_prompt", "max_off_policy_steps",
)  # fmt: skip
"""Settings shown first in their section."""
TRAILING = ("self_check", "dry_run", "machine")
"""Settings shown last in their section."""
WIDEST = 110
FLAG_COLUMN = 36
TYPES = {int: "INT", float: "NUMBER", str: "TEXT", Path: "PATH"}


def render(command: str, root: Setting, hidden: set[tuple[str, ...]]) -> str:
    """The help of a command.

    Args:
        hidden: settings to leave out.
    """
    width = min(shutil.get_terminal_size().columns, WIDEST)
    bold = _bold if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else str
    shown = {leaf.path[0] for leaf in root.leaves() if leaf.path not in hidden}
    roles = [name for name, child in root.children.items() if name in shown and _has_sections(child)]
    files = [*map(_place, root.positional)] or ["[@ FILE]", *(f"[--{role} @FILE]" for role in roles)]
    usage = textwrap.wrap(
        f"usage: {command} {' '.join(files)} [--FLAG VALUE]...".replace(" @", "\0@"),
        width, subsequent_indent=" " * len(f"usage: {command} "), break_on_hyphens=False,
    )  # fmt: skip
    lines = [line.replace("\0", " ") for line in usage]
    about = " ".join(root.doc.split()) if root.positional else _first_line(root.doc)
    lines += ["", *_fill(about, width), ""]
    if root.positional:
        lines += [bold("arguments")]
        lines += [line for one in root.positional for line in _row(one.flag, one.doc, width)]
    else:
        lines += _fill(
            "Settings come from files (TOML or JSON); flags override them. The flag --model.name is the key "
            "name in the section [model] of a file. --no-FLAG turns a switch off.",
            width,
        )
    lines += ["", bold("help")]
    lines += _row("-h, --help", "Show this and exit.", width)
    lines += [] if root.positional else _row("--version", "Show the version and exit.", width)
    for name, leaves in by_section(root, hidden):
        section = root.find(tuple(name.replace("-", "_").split("."))) if name else None
        doc = section.doc if section else (SupervisionConfig.__doc__ if name == "supervision" else "")
        doc = _first_line(doc or "")
        if section and section.optional:
            doc += f" Off by default; --{name} turns it on."
        lines += ["", bold(name or "general"), *_fill(doc, width, "  ")]
        for leaf in leaves:
            lines += _row(f"{leaf.flag} {values_of(leaf)}".rstrip(), _explained(leaf), width)
    return "\n".join(lines) + "\n"


def by_section(root: Setting, hidden: set[tuple[str, ...]]) -> list[tuple[str, list[Setting]]]:
    """The settings of a command, but for the hidden ones, by the names of their sections, most used first.

    The top-level settings have the name "", and those that are rarely set are in `supervision`.
    """
    sections: dict[str, list[Setting]] = {}
    for leaf in root.leaves():
        if leaf.path in hidden:
            continue
        name = ".".join(leaf.path[:-1]).replace("_", "-")
        if leaf.path[-1] in SupervisionConfig.model_fields and not name:
            name = "supervision"
        sections.setdefault(name, []).append(leaf)

    def rank(name: str) -> tuple[int, int]:
        if name in FIRST:
            return 0, FIRST.index(name)
        group = name.partition(".")[0]
        return (2, LAST.index(group)) if group in LAST else (1, 0)

    for leaves in sections.values():
        leaves.sort(key=_rank)
    return sorted(sections.items(), key=lambda item: rank(item[0]))


def _rank(leaf: Setting) -> int:
    """The position of a setting in its section; settings of equal rank keep the order of declaration."""
    name = leaf.path[-1]
    if name in TRAILING:
        return len(LEADING) + 1 + TRAILING.index(name)
    return LEADING.index(name) if name in LEADING else len(LEADING)


def _first_line(doc: str) -> str:
    return doc.strip().partition("\n")[0]


def _place(setting: Setting) -> str:
    """A setting that is given without a flag, in a command's usage."""
    return f"[{setting.flag}]" if setting.optional else f"{setting.flag}{'...' * (setting.kind == 'list')}"


def _has_sections(setting: Setting) -> bool:
    return any(child.kind == "section" for child in setting.children.values())


def values_of(leaf: Setting) -> str:
    """What a setting takes, in words such as INT or a|b; nothing for a switch."""
    match leaf.kind:
        case "flag":
            return ""
        case "table":
            return "JSON"
        case "list":
            kinds = [part for part in get_args(leaf.annotation) if part is not Ellipsis]
            names = [_type(kind) for kind in kinds] or ["VALUE"]
            return " ".join(names) if get_origin(leaf.annotation) is tuple else f"{names[0]}..."
        case _:
            return _type(leaf.annotation)


def _type(annotation: Any) -> str:
    while hasattr(annotation, "__metadata__"):
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is Union:
        return "|".join(_type(choice) for choice in get_args(annotation))
    if get_origin(annotation) is Literal:
        return "|".join(str(choice) for choice in get_args(annotation))
    return TYPES.get(annotation, "VALUE")


def default_of(leaf: Setting) -> str:
    """The default value as it is shown; nothing if it is None or empty."""
    default = leaf.default
    if isinstance(default, BaseModel) or default in (None, "", [], {}, ()):
        return ""
    if leaf.kind == "flag":
        return "on" if default else "off"
    return " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)


def _explained(leaf: Setting) -> str:
    """The docstring, with the default value if there is one."""
    shown = default_of(leaf)
    return f"{leaf.doc} [{shown}]".strip() if shown else leaf.doc


def _row(flag: str, text: str, width: int) -> list[str]:
    body = _fill(text, width, " " * FLAG_COLUMN) or [""]
    if len(flag) + 2 > width:  # its choices, on a line of their own
        flag = flag.replace(" ", "\n      ", 1)
    if len(flag) + 4 > FLAG_COLUMN:
        return [f"  {flag}", *body]
    return [f"  {flag}".ljust(FLAG_COLUMN) + body[0].lstrip(), *body[1:]]


def _fill(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, max(width, FLAG_COLUMN + 30), initial_indent=indent, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _bold(text: str) -> str:
    return f"\033[1m{text}\033[0m"
