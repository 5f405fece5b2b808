"""The tutorials, typed as they stand there: files are written as shown, and each command runs or is tried."""

import re
import shlex
from pathlib import Path

import pytest
from runs import REPOSITORY, Shell

import cairn

pytestmark = pytest.mark.timeout(600)

TUTORIALS = REPOSITORY / "docs/tutorials"
PAGES = ("first-sft", "first-rl", "first-agent")
AGENT = ["--model.name", "recipes/calculator/model", "--model.init-seed", "0"]
"""In place of the model that a run would have made which is not made here."""
ADDED = {
    "sft @ my_first/sft.toml": ["--max-steps", "2"],
    "sft @ my_first/sft.toml --ckpt.resume auto": ["--max-steps", "3"],
    "sft @ my_first/sft.toml --dry-run": ["--output-dir", "outputs/tried"],  # it comes after the runs here
    "sft @ my_agent/sft.toml": ["--dry-run"],
    "rl @ my_first/rl.toml --dry-run": ["--model.name", "outputs/my_first/checkpoints/step_3"],
    "rl @ my_agent/rl.toml --dry-run": AGENT,
    "rl @ my_agent/rl.toml @ my_agent/agent.toml --output-dir outputs/my_buyer --dry-run": AGENT,
}
"""What makes a run shorter, or a dry run of it, by the command as the page has it."""
LEFT_OUT = [
    "cairn chat outputs/my_first",
    "rl @ my_first/rl.toml --ckpt.resume auto",  # its dry run is made; test_api_runs.py has such a run
    "rollouts outputs/my_first_rl --best 3",
    "rollouts outputs/my_first_rl --worst 3",
    "diagnose outputs/my_first_rl",
    "ckpt audit outputs/my_first_rl",
    "rl @ my_agent/rl.toml --ckpt.resume auto",
    "rollouts outputs/my_agent_rl --best 1",
]
"""What needs a server, or a run that had one."""
PROGRAM = """
import os, runpy, sys
os.chdir({folder!r})
sys.path[:0] = ["my_first", "my_agent"]
for sys.argv in {typed!r}:
    print("typed:", *sys.argv, flush=True)
    name, *arguments = sys.argv
    if name == "python":
        runpy.run_path(arguments[0], run_name="__main__")
    elif name == "pytest":
        import test_my_rewards
        test_my_rewards.test_capitals()
    else:
        import cairn.launch.main as commands
        code = getattr(commands, "main" if name == "cairn" else name)()
        assert code == 0 or name == "diagnose", code
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A clone in which the files of all tutorials lie."""
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    for page in PAGES:
        text = (TUTORIALS / f"{page}.md").read_text()
        for block, name in re.findall(r"^```(?:python|toml)\n(# (my_[\w/.]+)\n.*?)^```", text, re.M | re.S):
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(block)
    return tmp_path


def commands() -> list[list[str]]:
    """The commands of all pages, in order, without variables and `uv run`."""
    found = []
    for page in PAGES:
        text = (TUTORIALS / f"{page}.md").read_text()
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S):
            for line in block.splitlines():
                words = shlex.split(line)
                needs = [words.pop(0)] if "=" in words[0] else []
                assert words[:2] == ["uv", "run"], line
                modules = any(name in line for name in ("rl @", "env try", "my_agent/examples.py"))
                assert bool(needs) == modules, f"{line}: it needs PYTHONPATH, or does not"
                found.append(words[2:])
    return found


def test_every_command_works_as_it_stands_there(folder: Path, shell: Shell):
    """Those of RL as a dry run, which imports rewards and tools, checks records, and renders problems."""
    typed = commands()
    assert [one for one in map(shlex.join, typed) if one in LEFT_OUT] == LEFT_OUT
    assert ADDED.keys() <= set(map(shlex.join, typed))
    first, resumed = "sft @ my_first/sft.toml", "sft @ my_first/sft.toml --ckpt.resume auto"
    programs = [words for words in typed if words[0] in ("python", "pytest")]
    runs = [first.split(), resumed.split()]
    rest = [words for words in typed if words not in programs + runs and shlex.join(words) not in LEFT_OUT]
    said = []
    for some in (programs, runs[:1], runs[1:], rest):
        lines = [[*words, *ADDED.get(shlex.join(words), [])] for words in some]
        with shell.start("python", "-c", PROGRAM.format(folder=str(folder), typed=lines)) as command:
            finished = command.finish()
        assert finished.code == 0, finished.output
        said.append(finished.output)
    run = cairn.Run(folder / "outputs" / "my_first")
    assert list(run.metrics.index) == [1, 2, 3]
    assert [step.number for step in run.steps] == [2, 3]
    tried = dict(part.split("\n", 1) for part in said[-1].split("typed: ")[1:])
    assert len(tried) == len(rest)
    model = " --model.name outputs/my_first/checkpoints/step_3"
    shown = {
        "sft @ my_first/sft.toml --dry-run --output-dir outputs/tried": "of their tokens are learned",
        f"rl @ my_first/rl.toml --dry-run{model}": "my_rewards:capitals",
        f"rl @ my_agent/rl.toml --dry-run {shlex.join(AGENT)}": "shop:Shop",
        "ckpt list outputs/my_first": "newest",
        "cairn env try dataset": "reward 0.75 (capitals 0.75) for 'OUB'",
        "cairn env try shop:Shop": "reward 1.1 (right 1, called 0.1, tool_calls 1, tool_errors 0)",
        "cairn new my_task": "my_task: 14 files",
    }
    for line, text in shown.items():
        assert any(text in what for typed_line, what in tried.items() if typed_line.startswith(line)), line
    assert any("my_agent/buyer.py" in text for line, text in tried.items() if "my_buyer" in line)
