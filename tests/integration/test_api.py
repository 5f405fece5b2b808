"""The public API from the outside: every example of docs/api.md, from a script and from a notebook."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from runs import DEADLINE, REPOSITORY, free_port

pytestmark = pytest.mark.timeout(600)

FACTS = """
import pandas
import torch

assert run.state == rl.state == "done"
assert list(run.metrics.index) == list(range(1, 9))
assert run.metrics["loss"].notna().all()
assert [step.number for step in run.steps] == [4, 8]
assert run.steps[-1].metrics["loss"] == run.metrics["loss"].iloc[-1]
assert run.steps[-1].nbytes > 4 * 604_000
assert "max-steps" in mistake
assert checkpoint.step == 8
assert checkpoint.trainer_state["progress"]["total_tokens"] == run.metrics["total_tokens"].iloc[-1]
weights = dict(model.named_parameters())
assert all(torch.equal(weights[name], tensor) for name, tensor in checkpoint.tensors.items())
assert checkpoint.optimizer.keys() == checkpoint.tensors.keys()
assert len(answers) == 2 * 16 * 8
assert sorted(answers.step.unique()) == [1, 2]
means = answers.groupby("step").reward.mean()
assert (means - rl.metrics["reward/mean"]).abs().max() < 1e-6
assert answers.prompt.str.contains("<user>[a-z]{3,8}<assistant>").all()
assert snapshot.roles["trainer"].state == "done"
assert snapshot.costs.recomputed_steps == 0
print("all facts hold")
"""


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (REPOSITORY / "docs" / "api.md").read_text(), re.M | re.S)


def test_every_example_of_the_page_works(tmp_path: Path):
    """What starts an RL run does so inside a running event loop, which is how a notebook runs a cell."""
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    script = [
        "import asyncio",
        "async def cell(code): exec(code, globals())",
        "mistake = ''",
    ]
    for block in blocks():
        if "cairn.rl(" in block:
            block = block.replace(
                "    max_steps=2,\n", f"    max_steps=2,\n    inference={{'port': {free_port()}}},\n"
            )
            script.append(f"asyncio.run(cell({block!r}))")
        else:
            script.append(block.replace("    print(error)", "    mistake = str(error)\n    print(error)"))
    path = tmp_path / "examples.py"
    path.write_text("\n".join([*script, FACTS]))
    done = subprocess.run(
        [sys.executable, path],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all facts hold\n")
    assert re.search(r"<cairn\.Run '.*outputs/api': done, step 4>", done.stdout)
