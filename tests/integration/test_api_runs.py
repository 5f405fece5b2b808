"""The public API from the outside: the examples of docs/reference/api.md, from a script and a notebook."""

import json
import math
import re
from pathlib import Path

import draws
import pytest
from runs import CONFIGS, DEADLINE, REPOSITORY, Server, Shell

import cairn

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
assert "max_step" in mistake
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
assert list(rates) == ["low", "high"]
assert {(one.state, one.step) for one in rates.values()} == {("done", 2)}
assert abs(rates["low"].metrics.lr.iloc[1] * 10 - rates["high"].metrics.lr.iloc[1]) < 1e-9
assert preferring.state == judge.state == "done"
assert abs(preferring.metrics["loss"].iloc[0] - 0.5) < 1e-4
assert type(rewarding).__name__ == "Qwen3ForSequenceClassification"
assert torch.equal(rewarding.score.weight, judge.steps[-1].load().tensors["score.weight"])
assert snapshot.costs.recomputed_steps == 0
print("all facts hold")
"""


def blocks(page: str, language: str = "python") -> list[str]:
    text = (REPOSITORY / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def with_server(config: str, server: Server) -> str:
    """A configuration of `rl` that uses `server` instead of starting one."""
    without, section, _ = config.partition("\n[inference]\n")
    assert section, "it starts no server"
    return without.replace("[orchestrator]\n", f'[orchestrator]\ninference_url = "{server.url}"\n')


@draws.in_turn("runs of the docs", 0, 2)
def test_every_example_of_the_page_works(tmp_path: Path, shell: Shell, server: Server):
    """What starts an RL run does so inside a running event loop, which is how a notebook runs a cell.

    Here it uses a server that is there; test_rl.py has `configs/reverse_text/rl.toml` start its own.
    """
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    script = [
        "import asyncio",
        "async def cell(code): exec(code, globals())",
        "mistake = ''",
    ]
    for block in blocks("reference/api.md"):
        if "cairn.rl(" in block:
            whole = Path(CONFIGS) / "rl.toml"
            (tmp_path / "rl.toml").write_text(with_server((REPOSITORY / whole).read_text(), server))
            block = block.replace(str(whole), "rl.toml")
            script.append(f"asyncio.run(cell({block!r}))")
        else:
            script.append(block.replace("    print(error)", "    mistake = str(error)\n    print(error)"))
    there = f"import os; os.chdir({str(tmp_path)!r})"
    with shell.start("python", "-c", "\n".join([there, *script, FACTS])) as command:
        finished = command.finish(2 * DEADLINE)
    assert finished.code == 0, finished.output
    assert "all facts hold\n" in finished.output
    assert re.search(r"<cairn\.Run '.*outputs/api': done, step 4>", finished.output)


@draws.in_turn("runs of the docs", 1, 2)
def test_a_run_with_an_environment_an_advantage_and_a_loss_of_ones_own(
    tmp_path: Path, shell: Shell, server: Server
):
    """The one of docs/how-to/extending.md, started as the page says, but with a server that is there."""
    for block in [*blocks("how-to/extending.md"), *blocks("how-to/extending.md", "toml")]:
        if name := re.match(r"# (\w+\.(?:py|toml))\n", block):
            (tmp_path / name[1]).write_text(block)
    whole = tmp_path / "extended.toml"
    whole.write_text(with_server(whole.read_text(), server))
    run = tmp_path / "run"
    environment = {"PYTHONPATH": str(tmp_path)}
    with shell.start("rl", "@", whole, "--output-dir", run, environment=environment) as command:
        finished = command.finish()
    assert finished.code == 0, finished.output
    assert list(cairn.Run(run).metrics.index) == [1, 2]
    answers = cairn.Run(run).rollouts()
    assert len(answers) == 2 * 4 * 4
    assert answers.prompt.str.fullmatch(r"<user>\d+\+\d+=<assistant>").all()
    assert "ratio/mean" not in cairn.Run(run).metrics  # which only Cairn's own losses report


def test_sft_with_a_loss_of_ones_own(tmp_path: Path, shell: Shell):
    """The one of docs/how-to/extending.md, started as the page says; the checkpoint names it."""
    for block in [*blocks("how-to/extending.md"), *blocks("how-to/extending.md", "toml")]:
        if name := re.match(r"# (my_sft\w*\.(?:py|toml))\n", block):
            (tmp_path / name[1]).write_text(block)
    flags = ("@", tmp_path / "my_sft.toml", "--output-dir", tmp_path / "run", "--ckpt")
    environment = {"PYTHONPATH": str(tmp_path)}
    with shell.start("sft", *flags, environment=environment) as command:
        finished = command.finish()
    assert finished.code == 0, finished.output
    run = cairn.Run(tmp_path / "run")
    # An untrained model finds all of its 102 tokens about equally likely, so the mean over tokens is log 102.
    # Here each sample's sum is divided only by the root of its length.
    assert (run.metrics["loss"] > 1.5 * math.log(102)).all()
    recipe = json.loads((tmp_path / "run" / "checkpoints" / "step_2" / "trainer" / "state.json").read_text())
    assert recipe["recipe"]["settings"]["loss.type"] == "my_sft_loss:EachSample"
    assert recipe["recipe"]["settings"]["loss.args"] == {"power": 0.5}
