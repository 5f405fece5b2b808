"""A whole run of a tiny model that calls tools, in environments of several kinds, on a real server."""

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from runs import REPOSITORY, Server, Shell, assert_published, printed, read, rows, step_folder, whole_rows
from sums import PROBLEMS

pytestmark = pytest.mark.timeout(900)

CALCULATOR = "recipes/calculator"
PROMPTS, SAMPLES, STEPS = 8, 4, 3


def configuration(folder: Path, data: Path) -> str:
    """That of the example, also with environments in processes, objects for rollouts, and agents."""
    process = {"python": sys.executable, "args": {"folder": str(folder)}}
    agent = str(REPOSITORY / "tests" / "sums_agent.py")
    rewards = [{"function": "sums:last_answer"}]
    environments = {
        "example": ("calculator", {"problems": 64, "seed": 1}),
        "tools": ("process", {"environment": "sums:Tools", **process}),
        "worlds": ("process", {"environment": "sums:Worlds", **process}),
        "objects": (
            "dataset",
            {"data": str(data), "environment_factory": "sums:Sum", "max_turns": 3, "rewards": rewards},
        ),
        "agents": (
            "agent",
            {"command": [sys.executable, agent], "data": str(data), "reward": "sums:judge"},
        ),
    }
    example = (REPOSITORY / CALCULATOR / "rl.toml").read_text().splitlines()
    lines = [line for line in example if not line.startswith("environment =")]
    for label, (name, args) in environments.items():
        lines += ["[[orchestrator.environments]]", f'label = "{label}"', f'name = "{name}"']
        lines += ["[orchestrator.environments.args]", *(f"{key} = {toml(one)}" for key, one in args.items())]
    return "\n".join(lines)


def toml(one: object) -> str:
    """A value as TOML."""
    if isinstance(one, dict):
        return "{" + ", ".join(f"{key} = {toml(inner)}" for key, inner in one.items()) + "}"
    return "[" + ", ".join(map(toml, one)) + "]" if isinstance(one, list) else json.dumps(one)


def noted(folder: Path, what: str) -> list[str]:
    """The lines of a file that environments write."""
    return (folder / what).read_text().splitlines() if (folder / what).exists() else []


def test_a_run_with_tools_survives_kills(shell: Shell, server: Server, tmp_path: Path):
    """The model has learned how calls are written, and vLLM's parser reads them.

    Killed are an environment's process (by itself, in the middle of a rollout), and the orchestrator. The
    agents' judge fails once for each conversation.
    """
    demonstrated, run, folder = tmp_path / "demonstrated", tmp_path / "run", tmp_path / "folder"
    folder.mkdir()
    (data := tmp_path / "data.jsonl").write_text(
        "".join(
            json.dumps({"prompt": one, "expression": one, "folder": str(folder)}) + "\n" for one in PROBLEMS
        )
    )
    (config := tmp_path / "rl.toml").write_text(configuration(folder, data))
    what = ("--max-steps", 100, "--output-dir", demonstrated, "--ckpt")
    shell.succeed("sft", "@", f"{CALCULATOR}/sft.toml", *what)
    assert_published(CALCULATOR, "examples", demonstrated)
    arguments = (
        *("rl", "@", config, "--model.name", step_folder(demonstrated, 100)),
        *("--output-dir", run, "--max-steps", STEPS, "--ckpt", "--orchestrator.inference-url", server.url),
        *("--orchestrator.prompts-per-step", PROMPTS, "--orchestrator.samples-per-prompt", SAMPLES),
        *("--orchestrator.reward-retry-seconds", 0.01),
    )
    with shell.start(*arguments) as command:
        command.wait_until(lambda: len(rows(run)) >= 1)
        command.family()  # while the processes of the environments have the parent that is killed
        os.kill(read(run / "roles.json")["roles"]["orchestrator"]["pid"], signal.SIGKILL)
        finished = command.finish()
        command.assert_nothing_survives()
    assert finished.code == 0, finished.output
    assert "orchestrator died" in finished.output
    found = whole_rows(run, STEPS)
    for label in ("example", "tools", "objects"):
        assert sum(row.get(f"env/{label}/rollout/tool_calls", 0) for row in found) > 0, label
    for label, turns in (("worlds", 3), ("agents", 2)):
        own = [row[f"env/{label}/rollout/turns"] for row in found if row[f"env/{label}/groups"]]
        assert own == [turns] * len(own) != [], (label, own)
    assert all(0 < row["mismatch/logprob_max"] < 1e-3 for row in found), found
    # Every turn was asked of the server that had the earlier ones, also after the orchestrator was killed.
    assert not any(row["servers/moved_sessions"] for row in found)
    homes = read(run / "sessions.json")
    assert homes["urls"] == [server.url]
    assert {number for _, number, _ in homes["homes"]} == {-1, *range(SAMPLES)}
    assert all(0 <= row["servers/cache_hits"] < 1 for row in found)  # blocks of 128 tokens on CPUs
    assert sum(row.get("rollouts/failed", 0) for row in found) == 0
    assert sum(row.get("rollouts/diverged", 0) for row in found) == 0
    report = json.loads(shell.succeed("ckpt", "audit", run, "--json"))
    assert report["ok"], report
    assert sum(epoch["trained"] for epoch in report["epochs"]) == STEPS * PROMPTS
    shown = json.loads(shell.succeed("rollouts", run, "--environment", "agents", "--json", "--limit", 1000))
    assert shown
    assert {len(one["turns"]) for one in shown} == {2}
    # The run began with a checkpoint, whose policy has sampled both turns of the first conversation.
    first = next(one for one in shown if one["step"] == 1)
    again = ("ckpt", "replay", run, "--rollout", f"1/{first['place']}/{first['sample']}", "--json")
    replayed = printed(shell.succeed(*again, "--server", server.url))
    assert [(one["turn"], one["drawn_again"], one["first_other_token"]) for one in replayed["spans"]] == [
        (0, True, None),
        (1, True, None),
    ]
    assert all(one["verdict"] in ("same", "close") for one in replayed["spans"]), replayed
    started = Counter(one.split()[0] for one in noted(folder, "started"))
    # A process of each is there to look at it, and for both orchestrators; the killed one is started again.
    assert started["Worlds"] == started["Tools"] + 1 >= 4, started
    assert "1" in noted(folder, "restored"), "the world is made again as it was before its second step"
    # A reward that fails is asked for again without the agent; only the killed orchestrator costs more.
    judged = noted(folder, "judged")
    assert len(judged) >= len(shown) + len(set(judged)) > len(shown)
    assert len(shown) <= started["agent"] < len(judged), started
