"""Pages that hold programs: what a reader would copy from them works."""

import ast
import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import draws
import pytest
import yaml
from runs import REPOSITORY, run_python

import cairn
from cairn.config.cli import COMMANDS, hidden_settings
from cairn.config.hints import unknown_setting
from cairn.config.settings import settings_of
from cairn.config.trainer import SFTConfig
from cairn.run import faults
from cairn.run.directory import RunDirectory
from cairn.run.extensions import syntax_tree
from cairn.run.messages import Attempt

DOCS = REPOSITORY / "docs"
sys.path.append(str(REPOSITORY / "scripts"))
site_pages = importlib.import_module("site_pages")
AT_THE_ROOT = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md", "SECURITY.md")


def blocks(page: str, language: str = "python") -> list[str]:
    """The page's code in that language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)


def run_script(path: Path, *blocks: str) -> str:
    """Run them as one program in the repository's root; returns what it prints."""
    path.write_text("\n".join(blocks))
    done = run_python(path, environment={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@draws.in_turn("the programs of the docs", 0, 2)
@pytest.mark.timeout(600)
def test_rl_on_one_page_learns(tmp_path: Path):
    """From chance, which is 1 in 20, to several times that."""
    facts = "print(sum(history[:5]) / 5, sum(history[-5:]) / 5)"
    *lines, ends = run_script(tmp_path / "rl.py", *blocks("concepts/rl-on-one-page.md"), facts).splitlines()
    first, last = map(float, ends.split())
    assert first < 0.08
    assert last > 3 * first
    assert len(lines) == 5


@pytest.mark.slow
@draws.in_turn("the programs of the docs", 1, 2)
def test_every_seam_has_a_working_example(tmp_path: Path):
    """Blocks that begin with a file's name are modules; the others are one program that uses them."""
    program = []
    for block in [*blocks("how-to/extending.md"), *blocks("how-to/seams.md")]:
        if name := re.match(r"# (my_\w+\.py)\n", block):
            (tmp_path / name[1]).write_text(block)
        else:
            program.append(block)
    run = RunDirectory(tmp_path / "outputs" / "one")
    run.path.mkdir(parents=True)
    run.begin(Attempt("run", 1, "sft", 3, None, "branch_1"))
    facts = f"lines = overview({str(run.path.parent)!r})\nprint(*lines)"
    printed = run_script(tmp_path / "seams.py", *program, facts)
    assert printed.splitlines()[-1] == "one: killed, step 3/None, 0 restarts {}"


def test_the_page_lists_the_fault_points_as_they_are():
    """docs/reference/faults.md has a table of them; the code has another one."""
    page = (DOCS / "reference" / "faults.md").read_text()
    listed = dict(re.findall(r"^\| `([\w.]+)` \| (.+?) \|$", page, re.M))
    assert listed == faults.POINTS


def test_links_between_pages_lead_somewhere():
    """Files exist, or the site makes them, and so do the headings that a link names."""
    made = {DOCS / path: text for path, text in site_pages.generated_pages().items()}
    for page in [*DOCS.rglob("*.md"), *(REPOSITORY / name for name in AT_THE_ROOT)]:
        for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", page.read_text()):
            name, _, anchor = target.partition("#")
            other = Path(os.path.normpath(page.parent / name)) if name else page
            assert other.exists() or other in made, f"{page.name}: {target}"
            text = made.get(other) or (other.read_text() if anchor else "")
            anchors = [site_pages.anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.M)]
            assert not anchor or anchor in anchors, f"{page.name}: {target}"


def test_every_page_has_a_place_in_the_menu():
    """In `nav` of mkdocs.yml, once; pages that the site makes are added to it when it is built."""
    nav = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"]
    listed = [name for name in leaves(nav) if name not in ("reference/python.md", "CHANGELOG.md")]
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def leaves(nav: Any) -> Iterator[str]:
    """The pages of a menu."""
    if isinstance(nav, str):
        yield nav
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from leaves(part)


def test_the_reference_has_every_setting_of_every_command():
    """As `--help` has them, and no others; the API's part has all of its names."""
    pages = site_pages.command_pages()
    for command, cls in COMMANDS.items():
        root = settings_of(cls)
        wanted = {leaf.flag for leaf in root.leaves() if leaf.path not in hidden_settings(root)}
        found = re.findall(r"^\| `(--[^`]+)` \|", pages[f"reference/commands/{command}.md"], re.M)
        assert sorted(found) == sorted(wanted)
        assert f"(`{command}`]({command}.md)" in pages["reference/commands/index.md"].replace("[", "(")
    (row,) = re.findall(r"^\| `--optimizer.lr` .*", pages["reference/commands/sft.md"], re.M)
    assert row.startswith(f"| `--optimizer.lr` | NUMBER | `{SFTConfig().optimizer.lr}` | ")
    named = re.findall(r"^## (\w+)$", site_pages.python_page(), re.M)
    assert sorted(named) == sorted(cairn.__all__)


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(DOCS.glob("tutorials/from-*.md")), ids=lambda page: page.stem)
def test_names_of_other_trainers(page: Path):
    """What the tables call a setting here is one; who types the other name as a flag is told the same."""
    roots = {name: settings_of(cls) for name, cls in COMMANDS.items()}
    rows = [row.split(" | ") for row in re.findall(r"^\|(.+)\|$", page.read_text(), re.M)]
    pairs = [[re.findall(r"`([\w.]+)`", cell) for cell in row[:2]] for row in rows if len(row) == 3]
    assert len(pairs) > 20
    for theirs, ours in pairs:
        for name in ours:
            assert any(root.find(tuple(name.split("."))) for root in roots.values()), name
        wanted = [f"--{name}".replace("_", "-") for name in ours] + [
            f"[[{name.split('.')[-1]}]]" for name in ours
        ]
        for name in theirs if ours else ():
            path = tuple(name.split("."))
            unknown = [root for root in roots.values() if not root.find(path)]
            told = [unknown_setting(path, root, hidden_settings(root), "x") for root in unknown]
            assert name in ours or any(one in text for one in wanted for text in told), name


def test_commands_on_the_pages_have_the_flags_that_they_are_given():
    """In blocks of every page: lines that are a command, with `uv run` and `cairn` before its name or not."""
    roots = {name.removeprefix("cairn "): root for name, root in site_pages.command_roots().items()}
    seen = 0
    for page in [*DOCS.rglob("*.md"), *(REPOSITORY / name for name in AT_THE_ROOT)]:
        for block in re.findall(r"^```(?:|bash|sh)\n(.*?)^```", page.read_text(), re.M | re.S):
            # What comes after ` -- ` is a command of its own.
            for line in block.replace("\\\n", " ").replace(" -- ", "\n").splitlines():
                typed = re.sub(r"^(\$ )?([A-Z_]+=\S+ )*(uv run )?(cairn )?", "", line.partition(" #")[0])
                root = next((roots[name] for name in roots if f"{typed} ".startswith(f"{name} ")), None)
                for flag in re.findall(r"(?<= )--([a-z][\w.-]*)", typed) if root else ():
                    assert is_setting(root, flag), f"{page.name}: there is no --{flag} in {line.strip()}"
                    seen += 1
    assert seen > 150


def is_setting(root: Any, flag: str) -> bool:
    """Whether a flag is a setting, the opposite of one, or a key of a table."""
    path = tuple(flag.replace("-", "_").split("."))
    opposite = (path[0].removeprefix("no_"), *path[1:])
    above = [root.find(path[:length]) for length in range(1, len(path))]
    return bool(root.find(path) or root.find(opposite)) or any(one and one.kind == "table" for one in above)


def test_links_out_of_the_site_are_shown_as_text():
    page = "[code](../../tests/runs.py) [page](../format.md#x) [paper](https://arxiv.org/abs/1) [here](#y)"
    shown = "code [page](../format.md#x) [paper](https://arxiv.org/abs/1) [here](#y)"
    assert site_pages.without_links_out(page, DOCS / "how-to") == shown


def test_every_metric_is_documented():
    """Each key with a slash that the roles' sources write, in docs/reference/metrics.md; <name> is any."""
    page = (DOCS / "reference" / "metrics.md").read_text()
    documented = [re.sub(r"<[^>]+>", "*", name) for name in re.findall(r"`([\w/<>:.]+)`", page)]
    documented += [name.replace("run/", "", 1) for name in documented if name.startswith("run/")]
    sources = Path(cairn.__file__).parent
    missing = set()
    for room in ("trainer", "orchestrator", "inference", "run"):
        for file in (sources / room).rglob("*.py"):
            found = {name for node in ast.walk(syntax_tree(file.read_text())) for name in metric_names(node)}
            missing |= {(file.name, name) for name in found if name not in documented}
    assert missing == NO_METRICS


NO_METRICS = {("checkpoints.py", "model/*"), ("batches.py", "data/*/*"), ("validation.py", "validation/*/*")}
"""Files of a checkpoint; counts of a data set, which the page describes in words; loss and perplexity."""


def metric_names(node: ast.AST) -> Iterator[str]:
    """Keys of dictionaries, and of assignments to them, that look like a metric; * for what is filled in."""
    keys: list[ast.expr | None] = []
    if isinstance(node, ast.Dict):
        keys = list(node.keys)
    elif isinstance(node, ast.DictComp):
        keys = [node.key]
    elif isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        keys = [target.slice for target in targets if isinstance(target, ast.Subscript)]
    for key in keys:
        parts = key.values if isinstance(key, ast.JoinedStr) else [key]
        name = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)
        if re.fullmatch(r"[a-z_]+(/[a-z_*]+)+", name):
            yield name
