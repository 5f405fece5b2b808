"""Pages that hold programs: what a reader would copy from them works."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import REPOSITORY

import cairn
from cairn.run import faults
from cairn.run.directory import RunDirectory
from cairn.run.messages import Attempt

DOCS = REPOSITORY / "docs"


def blocks(page: str, language: str = "python") -> list[str]:
    """The page's code in that language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)


def run_script(path: Path, *blocks: str) -> str:
    """Run them as one program in the repository's root; returns what it prints."""
    path.write_text("\n".join(blocks))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, path]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
def test_rl_on_one_page_learns(tmp_path: Path):
    """From chance, which is 1 in 20, to several times that."""
    facts = "print(sum(history[:5]) / 5, sum(history[-5:]) / 5)"
    *lines, ends = run_script(tmp_path / "rl.py", *blocks("concepts/rl-on-one-page.md"), facts).splitlines()
    first, last = map(float, ends.split())
    assert first < 0.08
    assert last > 3 * first
    assert len(lines) == 5


def test_every_seam_has_a_working_example(tmp_path: Path):
    """Blocks that begin with a file's name are modules; the others are one program that uses them."""
    program = []
    for block in blocks("how-to/extending.md"):
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
    """docs/concepts/checkpoints.md has a table of them; the code has another one."""
    page = (DOCS / "concepts" / "checkpoints.md").read_text()
    section = page.split("## Faults on demand", 1)[1].split("\n## ", 1)[0]
    listed = dict(re.findall(r"^\| `([\w.]+)` \| (.+?) \|$", section, re.M))
    assert listed == faults.POINTS


def test_links_between_pages_lead_somewhere():
    """Files exist, and so do the headings that a link names."""
    for page in [*DOCS.rglob("*.md"), REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", page.read_text()):
            name, _, anchor = target.partition("#")
            other = page.parent / name if name else page
            assert other.exists(), f"{page.name}: {target}"
            headings = re.findall(r"^#+ (.+)$", other.read_text(), re.M) if anchor else []
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert not anchor or anchor in slugs, f"{page.name}: {target}"


def test_every_metric_is_documented():
    """Each key with a slash that the roles' sources write, in docs/reference/metrics.md; <name> is any."""
    page = (DOCS / "reference" / "metrics.md").read_text()
    documented = [re.sub(r"<[^>]+>", "*", name) for name in re.findall(r"`([\w/<>:.]+)`", page)]
    documented += [name.replace("run/", "", 1) for name in documented if name.startswith("run/")]
    sources = Path(cairn.__file__).parent
    missing = set()
    for room in ("trainer", "orchestrator", "inference", "run"):
        for file in (sources / room).rglob("*.py"):
            found = {name for node in ast.walk(ast.parse(file.read_text())) for name in metric_names(node)}
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
