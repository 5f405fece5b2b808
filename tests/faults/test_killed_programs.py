"""The orchestrator's process is killed at every turn and every tool call of programs and of agents."""

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
from errands import Servers
from runs import CONFIGS, REPOSITORY, forked

from cairn.config.environment import AdvantageConfig
from cairn.config.model import ModelConfig
from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig, SamplingConfig
from cairn.orchestrator.ledger import read_ledger
from cairn.orchestrator.loop import Orchestrator
from cairn.run.batches import RLBatch
from cairn.run.messages import Attempt
from cairn.run.view import RunView
from cairn.tools.audit.ledger import check_learned, check_ledger
from cairn.tools.audit.report import Report

MODEL = REPOSITORY / CONFIGS / "model"
ATTEMPT = Attempt("run", 1, "rl", 0, None, "branch_1")
TURNS, SAMPLES = 8, 2
POINTS = "orchestrator.turn:kill@1", "orchestrator.call:kill@1"
AGENT_TURNS = 4
AGENT = """
import json, os, sys, urllib.request

problem = json.load(open(os.environ["CAIRN_PROBLEM"]))
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
messages = [{"role": "user", "content": problem["prompt"]}]
for turn in range(int(sys.argv[1])):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        message = json.load(answer)["choices"][0]["message"]
    with open(problem["log"], "a") as log:  # its own tool, of which nobody but the agent knows
        log.write(f"{os.environ['CAIRN_SEED']} {turn} {message['content']}\\n")
    messages += [message, {"role": "user", "content": message["content"][::-1] + str(turn)}]
"""


def configuration(folder: Path) -> OrchestratorConfig:
    """One batch of `SAMPLES` answers, of the environment that the folder is named after.

    Agents answer a prompt each and go one by one, up to their rewards: a kill at what one has done does not
    find another's request or reward on its way.
    """
    kind = folder.parent.name
    prompts, samples = (SAMPLES, 1) if kind == "agent" else (1, SAMPLES)
    arguments = {"turns": TURNS, "problems": 3, "log": str(folder / "visits")}
    environment = EnvironmentConfig(name=f"errands:{kind}", args=arguments)
    if kind == "agent":
        environment = EnvironmentConfig(
            name="agent",
            args={
                "command": [sys.executable, "-S", "-c", AGENT, str(AGENT_TURNS)],
                "data": str(folder / "problems.jsonl"),
                "reward": "errands:judged",
            },
        )
    return OrchestratorConfig(
        model=ModelConfig(name=str(MODEL)),
        output_dir=str(folder / "run"),
        environment=environment,
        sampling=SamplingConfig(max_tokens=8),
        prompts_per_step=prompts,
        samples_per_prompt=samples,
        advantage=AdvantageConfig(type="grpo" if samples > 1 else "reinforce_plus_plus"),
        max_off_policy_steps=0,
        max_in_flight=samples,
        max_steps=1,
        self_check=False,
    )


def orchestrate(folder: Path, fault: str) -> None:
    """A process that runs the orchestrator until it has shipped the batch, or is killed."""
    if fault:
        os.environ["CAIRN_FAULT"] = fault
    config = configuration(folder)
    run = config.run_directory()

    async def until_shipped() -> None:
        orchestrator = Orchestrator(config, ATTEMPT, Servers(log=folder / "requests", keep=False))
        running = asyncio.create_task(orchestrator.run())
        while orchestrator.state.ledger.shipped(1) is None and not running.done():
            await asyncio.sleep(0.001)
        if running.done():
            running.result()
        running.cancel()
        await asyncio.wait([running])

    run.path.mkdir(parents=True, exist_ok=True)
    run.begin(ATTEMPT)
    asyncio.run(until_shipped())


def shipped(folder: Path) -> RLBatch:
    batch = configuration(folder).run_directory().batch(ATTEMPT, 1)
    assert batch is not None
    return batch


def run(folder: Path, fault: str) -> int:
    """How an orchestrator's process has ended."""
    folder.mkdir(parents=True, exist_ok=True)
    with forked(orchestrate, folder, fault) as process:
        process.join(120)
        code = process.exitcode
    assert code in (0, -signal.SIGKILL)
    return code


def lines(folder: Path, name: str) -> Counter[str]:
    """How often each tool was called, or each seed asked for; the process does not count."""
    return Counter(" ".join(line.split()[:2]) for line in (folder / name).read_text().splitlines())


@pytest.mark.timeout(600)
def test_killed_at_every_turn(tmp_path: Path):
    """By SIGKILL: each tool is called once, each answer sampled once, and the batch is as undisturbed."""
    calm, stormy = tmp_path / "Errands" / "calm", tmp_path / "Errands" / "stormy"
    assert run(calm, "") == 0
    deaths = 0
    while run(stormy, POINTS[deaths // TURNS % 2]) != 0:
        deaths += 1
    assert deaths == 2 * TURNS + 1  # at each turn of the first rollout and its last call, then at each call
    assert shipped(stormy).digest() == shipped(calm).digest()
    for name in ("visits", "requests"):
        assert lines(stormy, name) == lines(calm, name)
        assert set(lines(stormy, name).values()) == {1}
        assert len(lines(stormy, name)) == TURNS * SAMPLES
    audit(stormy)


@pytest.mark.timeout(600)
def test_a_world_goes_on_in_the_next_process(tmp_path: Path):
    """From its snapshot: besides what was under way in one rollout when the other died, all is done once."""
    calm, stormy = tmp_path / "Trip" / "calm", tmp_path / "Trip" / "stormy"
    assert run(calm, "") == 0
    deaths = 0
    while run(stormy, "orchestrator.call:kill@4") != 0:
        deaths += 1
    assert deaths == SAMPLES * (1 + TURNS) // 4
    assert shipped(stormy).digest() == shipped(calm).digest()
    visits = lines(stormy, "visits")
    restored = sum(visits.pop(what) for what in list(visits) if what.endswith("restore"))
    assert deaths <= restored <= SAMPLES * deaths
    assert visits.keys() == lines(calm, "visits").keys()
    assert visits.total() <= SAMPLES * (1 + TURNS) + deaths
    assert lines(stormy, "requests").keys() == lines(calm, "requests").keys()
    audit(stormy)


@pytest.mark.timeout(600)
def test_agents_killed_at_every_turn(tmp_path: Path):
    """Each answer is sampled once and each reward asked once; who lives on does not run an agent again."""
    calm, stormy = tmp_path / "agent" / "calm", tmp_path / "agent" / "stormy"
    for folder in (calm, stormy):
        folder.mkdir(parents=True)
        row = {"prompt": "ab", "log": str(folder / "visits")}
        (folder / "problems.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    assert run(calm, "") == 0
    for fault in ([POINTS[0]] * AGENT_TURNS + [POINTS[1]] * 2) * SAMPLES:  # each turn, the end, the reward
        assert run(stormy, fault) != 0, "the batch was shipped before all of it was asked"
    assert run(stormy, "") == 0
    assert shipped(stormy).digest() == shipped(calm).digest()
    for name in ("rewards", "requests"):
        assert lines(stormy, name) == lines(calm, name)
        assert set(lines(stormy, name).values()) == {1}
    assert len(lines(stormy, "rewards")) == SAMPLES
    assert len(lines(stormy, "requests")) == AGENT_TURNS * SAMPLES
    visits = lines(stormy, "visits")
    assert visits.keys() == lines(calm, "visits").keys(), "an agent has done something else"
    # at each turn it starts again, once it has ended never
    assert all(count == AGENT_TURNS - int(visit.split()[1]) for visit, count in visits.items()), visits
    audit(stormy, AGENT_TURNS)


def audit(stormy: Path, turns: int = TURNS) -> None:
    """The audit finds nothing wrong with what was shipped."""
    batch, directory = shipped(stormy), configuration(stormy).run_directory()
    report = Report(str(directory.path), "rl", last_step=1)
    ledger = read_ledger(directory.ledger)
    tokens = sum(len(sample.token_ids) for sample in batch.samples)
    row = {"step": 1, "total_samples": len(batch.samples), "total_tokens": tokens}
    check_ledger(ledger, [row | {"batch/digest": batch.digest()}], {}, ATTEMPT, report)
    check_learned(RunView(directory.path), ATTEMPT, ledger, report)
    assert [asdict(violation) for violation in report.violations] == []
    assert len(ledger.turns) == turns * SAMPLES
    assert batch.metrics["rollouts/diverged"] == batch.metrics["rollouts/failed"] == 0
    assert batch.metrics["rollout/turns"] == turns
