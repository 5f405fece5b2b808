"""Pages that are made when the site is built: mkdocs calls the functions `on_...`, as mkdocs.yml says.

Generated are the settings of every command, from the docstrings in src/config, and the public Python API,
from its docstrings. Neither needs PyTorch. Links that leave docs/ are shown as text.
"""

import importlib
import inspect
import os
import re
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cairn.config import help as terminal
from cairn.config.cli import COMMANDS, hidden_settings
from cairn.config.settings import Setting, settings_of
from cairn.config.shared import ToolCommand
from cairn.evaluate.chat import Chat

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TOOLS = ("cairn.tools.ckpt", "cairn.tools.rollouts", "cairn.watch.commands", "cairn.watch.page.command")
TOOLS += ("cairn.tools.new", "cairn.tools.env")
"""Modules whose classes are the commands that look at runs and checkpoints."""


# What mkdocs calls.


def on_config(config: Any) -> Any:
    """Headings get the anchors that they have where the pages are read as files; commands are in the menu."""
    menu = [{name: path} for name, path in zip(["All", *command_roots()], command_pages(), strict=True)]
    (reference,) = [one["Reference"] for one in config.nav if "Reference" in one]
    reference.insert(0, {"Commands and their settings": menu})
    config.mdx_configs.setdefault("toc", {})["slugify"] = lambda heading, _: anchor(heading)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, the changelog, which lies at the root, and the figures of recipes."""
    from mkdocs.structure.files import File

    changes = (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](")
    for path, text in {**generated_pages(), "CHANGELOG.md": changes}.items():
        files.append(File.generated(config, path, content=text))
    for figure in sorted(ROOT.glob("recipes/*/results.png")):
        path = f"results/recipe_{figure.parent.name}.png"
        files.append(File.generated(config, path, abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Show links out of docs/ as text: the site has no page of theirs. Figures of recipes it has."""
    to_results = os.path.relpath("results", Path(page.file.src_uri).parent)
    markdown = re.sub(r"\((?:\.\./)+recipes/(\w+)/results\.png\)", rf"({to_results}/recipe_\1.png)", markdown)
    return without_links_out(markdown, (DOCS / page.file.src_uri).parent)


def generated_pages() -> dict[str, str]:
    """The pages of the reference, by their paths below docs/."""
    return {**command_pages(), "reference/python.md": python_page()}


def anchor(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def without_links_out(markdown: str, folder: Path) -> str:
    """A page in `folder` without its links to files outside docs/; their texts stay."""

    def shown(link: re.Match[str]) -> str:
        if re.match(r"[a-z]+:", link[2]):
            return link[0]
        target = Path(os.path.normpath(folder / link[2].partition("#")[0]))
        return link[0] if target.is_relative_to(DOCS) else link[1]

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", shown, markdown)


# The commands.


def command_pages() -> dict[str, str]:
    """For each command a page with all its settings, and one that lists them, by path below docs/."""
    index = [
        "# Commands and their settings",
        "",
        "Made from the docstrings in `src/config`, which `--help` shows, too.",
    ]
    index += ["", "| command | does |", "|---|---|"]
    pages = {}
    for name, root in command_roots().items():
        file = f"{name.replace(' ', '-')}.md"
        index.append(f"| [`{name}`]({file}) | {_cell(_first(root.doc))} |")
        pages[f"reference/commands/{file}"] = _command_page(name, root)
    return {"reference/commands/index.md": "\n".join([*index, ""]), **pages}


def command_roots() -> dict[str, Setting]:
    """The settings of each command, by its name."""
    for module in TOOLS:
        importlib.import_module(module)
    tools = sorted(
        (cls for cls in _below(ToolCommand) if "command" in vars(cls)), key=lambda cls: cls.command
    )
    classes = {**COMMANDS, **{cls.command: cls for cls in (*tools, Chat)}}
    return {name: settings_of(cls) for name, cls in classes.items()}


def _command_page(name: str, root: Setting) -> str:
    lines = ["---", "search:", "  boost: 0.5", "---", f"# `{name}`", "", _linked(" ".join(root.doc.split()))]
    if root.positional:
        lines += ["", "| argument | |", "|---|---|"]
        lines += [f"| `{one.flag}` | {_cell(one.doc)} |" for one in root.positional]
    for section, leaves in terminal.by_section(root, hidden_settings(root)):
        found = root.find(tuple(section.replace("-", "_").split("."))) if section else None
        lines += ["", f"## {section or 'general'}", ""]
        if found and found.kind == "section":
            switch = f" Off by default; `--{section}` turns it on." if found.optional else ""
            lines += [_linked(_first(found.doc)) + switch, ""]
        lines += ["| setting | takes | default | |", "|---|---|---|---|"]
        for leaf in leaves:
            takes = terminal.values_of(leaf) or "on, off"
            cells = [f"`{leaf.flag}`", _cell(takes.replace("|", ", ")), _code(terminal.default_of(leaf))]
            lines.append(f"| {' | '.join([*cells, _cell(leaf.doc)])} |")
    return "\n".join([*lines, ""])


def _below(cls: type[Any]) -> Iterable[type[Any]]:
    for child in cls.__subclasses__():
        yield child
        yield from _below(child)


def _first(doc: str) -> str:
    return doc.strip().partition("\n")[0]


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""


def _cell(text: str) -> str:
    """A docstring as a cell of a table."""
    return _linked(text.replace("|", "\\|").replace("<", "&lt;").replace("[[", "\\[[").replace("*", "\\*"))


def _linked(text: str) -> str:
    """A docstring in which the names of pages are links, as seen from reference/commands/."""
    return re.sub(r"\bdocs/([\w/-]+\.md)", r"[\1](../../\1)", text)


# The Python API.


def python_page() -> str:
    """Every public name of `cairn` with its signature and docstring."""
    import cairn

    lines = [
        "# Python API, name by name",
        "",
        "What `import cairn` offers, from the docstrings. [By example](api.md).",
    ]
    for name in sorted(cairn.__all__, key=str.lower):
        value = getattr(cairn, name)
        lines += ["", f"## {name}", "", *_described(name, value)]
        if inspect.isclass(value) and not issubclass(value, Exception):
            for member, what in vars(value).items():
                if member.startswith("_") or not (inspect.isfunction(what) or isinstance(what, property)):
                    continue
                lines += ["", f"### {name}.{member}", "", *_described(f"{name}.{member}", what)]
    return "\n".join([*lines, ""])


def _described(name: str, value: Any) -> list[str]:
    """The signature, if it has one, and the docstring, whose sections `Args:` and the like become lists."""
    lines = []
    if isinstance(value, property):
        returned = typing.cast("Any", value.fget).__annotations__.get("return", "")
        lines += ["```python", f"{name}: {_annotation(returned)}", "```", ""]
    elif inspect.isfunction(value):
        lines += ["```python", f"{name}{_signature(value)}", "```", ""]
    doc = inspect.getdoc(value) or ""
    doc = re.sub(r"^(Args|Returns|Raises|Attributes):$", r"\n**\1**\n", doc, flags=re.M)
    doc = re.sub(r"^    (\w[\w.*]*): ", r"- `\1`: ", doc, flags=re.M)
    return [*lines, re.sub(r"^ {4,8}(?=\S)", "  ", doc, flags=re.M)]


def _signature(function: Any) -> str:
    found = inspect.signature(function)
    kept = [
        one.replace(annotation=inspect.Parameter.empty) if one.name == "self" else one
        for one in found.parameters.values()
    ]
    text = str(found.replace(parameters=[one for one in kept if one.name != "self"]))
    return re.sub(r"'([^']*)'", r"\1", text)


def _annotation(value: Any) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", str(value))
