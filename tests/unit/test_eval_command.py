"""`eval`: the numbers of in-training evaluations, afterwards; killed, it goes on; what it refuses."""

import asyncio
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import REPOSITORY
from test_evaluation import LAST, Noting, evaluated, rows
from test_pipeline import ATTEMPT, LONGEST, MODEL, Trainer, begin, configuration, see_through
from test_server_pool import FakeServer

from cairn.checkpoint.store import CheckpointStore
from cairn.config.cli import load
from cairn.config.orchestrator import EvaluateConfig, OrchestratorConfig
from cairn.config.rl import RLConfig
from cairn.inference.client import TOKEN_VARIABLE
from cairn.launch.commands import start
from cairn.orchestrator.rollout_log import KeptRollouts
from cairn.run.errors import UsageError
from cairn.run.exits import EXIT_STOPPED

__all__ = ["configuration"]
NUMBERS = ("reward", "reward_ci95", "pass@1", "pass@2", "pass@4", "tokens", "truncated", "failed", "samples")
"""What does not depend on when and where a policy is evaluated."""


class Answering(FakeServer):
    """Answers as the servers of `test_pipeline` do: tokens depend on seed and place, lengths on the seed."""

    def __init__(self) -> None:
        super().__init__()
        self.more_status = {"model": str(MODEL)}
        self.seeds: list[int] = []
        """Of the first pieces of answers."""
        self.stop_after: int | None = None
        """Requests after which this process gets SIGINT."""

    def choices(self, body: dict) -> list[dict]:
        sampling = body["sampling_params"]
        self.seeds += [sampling["seed"] + i for i in range(sampling["n"])]
        if self.stop_after is not None and len(self.asked) == self.stop_after:
            os.kill(os.getpid(), signal.SIGINT)
        return [self.choice(i, sampling["seed"] + i, sampling["max_tokens"]) for i in range(sampling["n"])]

    def choice(self, number: int, seed: int, most: int) -> dict:
        length = 1 + seed % LONGEST
        tokens = [6 + (seed + place) % 26 for place in range(min(length, most))]
        return {
            "index": number,
            "token_ids": tokens,
            "logprobs": {"content": [{"logprob": -0.5}] * len(tokens)},
            "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}],
            "finish_reason": "stop" if length <= most else "length",
        }


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answering]:
    """A server in a thread of its own."""
    monkeypatch.setenv(TOKEN_VARIABLE, "t")
    fake, loop = Answering(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(fake.start(), loop).result(20)
    yield fake
    asyncio.run_coroutine_threadsafe(fake.die(), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def run(configuration: OrchestratorConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 7 steps that evaluated its policies 0, 3, 6 and 7, and saved 2, 4, 6 and 7."""
    folder = tmp_path_factory.mktemp("eval") / "run"
    config = evaluated(configuration, folder, 1, {"name": "words"})
    directory = begin(config, ATTEMPT)
    draw = random.Random(4)
    asyncio.run(see_through(config, ATTEMPT, Trainer(directory, ATTEMPT, LAST, draw), Noting(draw), []))
    directory.config.write_text(RLConfig(orchestrator=config).model_dump_json())
    return folder


def run_eval(server: Answering | None, out: Path, *arguments: object) -> int:
    given = ["--inference-url", server.url] if server else []
    return start("eval", load(EvaluateConfig, [*map(str, arguments), *given, "--out", str(out)]))


def test_a_step_evaluated_later_gives_the_numbers_of_the_training(
    run: Path, server: Answering, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """All settings come from the run; the output tells of the answers, and is complete."""
    out = tmp_path / "out"
    assert run_eval(server, out, "--all", run, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found == rows(out)
    assert [row["step"] for row in found] == [2, 4, 6, 7]
    during = {row["step"]: row for row in rows(run)}
    for row in found[2:]:
        assert {key: row[key] for key in NUMBERS} == {key: during[row["step"]][key] for key in NUMBERS}
        assert (row["run_id"], row["branch"]) == (during[6]["run_id"], during[6]["branch"])
    assert found[2]["tokens"] != found[3]["tokens"], "each step has draws of its own"
    (label,) = (path for path in out.iterdir() if path.name.startswith("run-"))
    kept = KeptRollouts(label / "words" / "rollouts")
    assert kept.steps() == [2, 4, 6, 7]
    assert len(kept.read(6)) == found[2]["samples"] == 24
    assert {row["environment"] for row in kept.read(6)} == {"reverse_text"}
    assert {
        span["version"] for row in kept.read(6) for turn in row["turns"] for span in turn["versions"]
    } == {f"eval-{found[2]['policy']}:{found[2]['branch']}:6"}
    assert not list((out / "ledgers").iterdir())
    asked = len(server.asked)
    assert run_eval(server, out, "--model.name", run, "--models", run / "checkpoints" / "step_6") == 0
    assert len(server.asked) == asked, "results are there"
    table = capsys.readouterr().out
    assert "step_7" in table
    assert f"{found[3]['reward']:.4g} ± {found[3]['reward_ci95']:.2g}" in table


@pytest.mark.parametrize("after", [1, 9])
def test_an_interrupted_evaluation_goes_on_with_the_answers_that_it_has(
    run: Path, server: Answering, tmp_path: Path, capsys: pytest.CaptureFixture[str], after: int
):
    """SIGINT in the middle; then the same command again."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    step = run / "checkpoints" / "step_6"
    assert run_eval(server, whole, "--model.name", step) == 0
    server.seeds.clear()
    server.asked.clear()
    server.stop_after = after
    assert run_eval(server, out, "--model.name", step, "--max-in-flight", 4) == EXIT_STOPPED
    assert "the same command goes on there" in capsys.readouterr().out
    server.stop_after = None
    (ledger,) = (out / "ledgers").glob("*.sqlite")
    with sqlite3.connect(ledger) as database:
        (complete,) = database.execute("SELECT count(*) FROM samples WHERE reward IS NOT NULL").fetchone()
    assert run_eval(server, out, "--model.name", step) == 0
    again = sum(count - 1 for count in Counter(server.seeds).values())
    assert again <= 4, "what was in flight"
    assert complete or after == 1, "it is stopped in the middle"
    first, second = rows(whole)[0], rows(out)[0]
    assert {key: first[key] for key in NUMBERS} == {key: second[key] for key in NUMBERS}


class Moody:
    """Fails as long as a file is there."""

    def __init__(self, broken: str):
        self.broken = Path(broken)

    def __len__(self) -> int:
        return 5

    def messages(self, problem: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "hill"}]

    def reward(self, problem: int, answer: str) -> float:
        if self.broken.exists() and problem > 1:
            raise RuntimeError("the judge is away")
        return float(problem)


def test_answers_that_failed_are_rewarded_by_the_same_command_and_not_sampled_again(
    server: Answering, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A model that is no step of a run, in one environment."""
    (broken := tmp_path / "broken").touch()
    arguments = ["--model.name", MODEL, "--model.init-seed", 0, "--samples", 2, "--sampling.max-tokens", 9]
    arguments += ["--env.name", f"{__name__}:Moody", "--env.args", json.dumps({"broken": str(broken)})]
    arguments += ["--reward-retries", 0]
    assert run_eval(server, tmp_path / "out", *arguments) == 0
    assert "6 answers have failed" in capsys.readouterr().out
    asked = len(server.asked)
    broken.unlink()
    assert run_eval(server, tmp_path / "out", *arguments) == 0
    assert len(server.asked) == asked
    found = rows(tmp_path / "out")
    assert [(row["failed"], row["samples"], row["reward"]) for row in found] == [(6, 4, 0.5), (0, 10, 2.0)]
    assert found[1]["run_id"] is None


def test_agents_work_below_the_folder_for_results_whatever_run_the_file_is_of(
    server: Answering, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A run that is going on has the folders of its own agents there."""
    theirs = tmp_path / "run" / "agents" / "0-a"
    theirs.mkdir(parents=True)
    (tmp_path / "problems.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "orch.toml").write_text(f"output_dir = {json.dumps(str(tmp_path / 'run'))}")
    args = {"command": [sys.executable, "-S", "-c", "pass"], "data": str(tmp_path / "problems.jsonl")}
    arguments = ["@", tmp_path / "orch.toml", "--model.name", MODEL, "--model.init-seed", 0, "--samples", 1]
    arguments += ["--env.name", "agent", "--env.args", json.dumps(args), "--reward-retries", 0]
    assert run_eval(server, tmp_path / "out", *arguments) == 1
    assert "was never answered by the model" in rows(tmp_path / "out")[0]["error"]
    assert "the agent ended with exit code 0" in (tmp_path / "out" / "logs" / "agents.log").read_text()
    assert theirs.is_dir()
    assert [one.name for one in (tmp_path / "run").iterdir()] == ["agents"]


def test_a_damaged_step_is_left_out_and_remote_steps_are_evaluated(
    run: Path, server: Answering, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """And a step's copy in an object store gives what the step does."""
    copy, remote = tmp_path / "copy", tmp_path / "remote"
    shutil.copytree(run, copy)
    for step in (2, 4):
        CheckpointStore(copy / "checkpoints").delete(step)
    upload(copy / "checkpoints" / "step_6", remote)
    file = copy / "checkpoints" / "step_7" / "model" / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:-1] + b" ")
    assert run_eval(server, tmp_path / "out", "--all", copy) == 1
    assert "not evaluated" in (told := capsys.readouterr().out)
    assert "step_7" in told
    (row,) = rows(tmp_path / "out")
    tables = tmp_path / "eval.json"
    tables.write_text(
        RLConfig.model_validate_json((run / "config.json").read_text()).orchestrator.model_dump_json(
            include={"eval", "sampling", "seed"}
        )
    )
    assert run_eval(server, tmp_path / "away", "@", tables, "--all", f"file://{remote}") == 0
    (away,) = rows(tmp_path / "away")
    assert {key: row[key] for key in (*NUMBERS, "policy")} == {key: away[key] for key in (*NUMBERS, "policy")}
    assert not list((tmp_path / "away" / "downloads").glob("step_*"))


def upload(step: Path, folder: Path) -> None:
    from cairn.run.output import no_progress
    from cairn.tools.ckpt_places import tier_for_copies

    url = f"file://{folder}"
    tier_for_copies(url).take(step, url, stage=no_progress)


def test_a_damaged_record_of_settings_is_refused_with_advice(run: Path, server: Answering, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "evaluations.json").write_text('{"begun":')
    for _ in range(2):  # the folder is not left locked
        with pytest.raises(UsageError, match=r"(?s)evaluations.json: is damaged.* Give another --out; or"):
            run_eval(server, tmp_path / "out", "--all", run)


def test_a_server_that_a_run_may_use_is_refused(run: Path, server: Answering, tmp_path: Path):
    """Unless that run is known to be over, or the user says so."""
    step = run / "checkpoints" / "step_6"
    server.version = "another:main:12"
    with pytest.raises(UsageError, match="step 12 of run another, which may be going on"):
        run_eval(server, tmp_path / "out", "--model.name", step)
    assert server.pushed == []
    server.version = f"{ATTEMPT.run_id}:branch_1:7"  # its own, at which nobody is at work
    assert run_eval(server, tmp_path / "out", "--model.name", step) == 0
    server.version, server.asleep = "default", True
    with pytest.raises(UsageError, match="it is asleep"):
        run_eval(server, tmp_path / "two", "--model.name", step)
    server.version, server.asleep = "another:main:12", False
    assert run_eval(server, tmp_path / "two", "--model.name", step, "--take-server") == 0


def test_a_server_that_computes_something_else_is_refused(run: Path, server: Answering, tmp_path: Path):
    shutil.copytree(MODEL, other := tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(
        json.dumps(config | {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}})
    )
    server.more_status = {"model": str(other)}
    with pytest.raises(UsageError, match="has another architecture"):
        run_eval(server, tmp_path / "out", "--model.name", run)
    server.more_status = {"model": "owner/name"}
    with pytest.raises(UsageError, match="can't be read here"):
        run_eval(server, tmp_path / "out", "--model.name", run)
    assert server.pushed == []


def test_what_is_refused_before_anything_starts(run: Path, server: Answering, tmp_path: Path):
    out = tmp_path / "out"
    model = ("--model.name", run)
    refused = {
        "eval needs a model": (),
        "there is no such folder": ("--all", tmp_path / "nothing"),
        "needs something to evaluate in": ("--model.name", MODEL, "--model.init-seed", 0),
        "would all be the same": (*model, "--temperature", 0),
        "evaluation 'no.module.Class'": (*model, "--env.name", "no.module:Class"),
        "evaluation 'environment'": (*model, "--env.name", ":::"),
        "is the directory of a run": (*model, "--out", run),
        "can't be made, or written to": (*model, "--out", run / "config.json"),
        "no such parser": (*model, "--tool-parser", "none"),
    }
    for message, arguments in refused.items():
        with pytest.raises(UsageError, match=message):
            start("eval", load(EvaluateConfig, ["--out", str(out), *map(str, arguments)]))
    assert run_eval(server, out, *model, "--problems", 2) == 0
    with pytest.raises(UsageError, match=r"problems = 3, but --out .* has results with 2"):
        run_eval(server, out, *model, "--problems", 3)
    assert run_eval(server, out, *model, "--problems", 2, "--env.name", "reverse_text") == 0
    again = ("--problems", 3, "--env.name", "reverse_text", "--env.label", "three")
    assert run_eval(server, out, *model, *again) == 0
    assert [row["name"] for row in rows(out)] == ["words", "reverse_text", "three"]


def test_the_orchestrators_file_is_one_of_eval(capsys: pytest.CaptureFixture[str]):
    """Whatever it says of the training is ignored."""
    file = REPOSITORY / "configs" / "reverse_text" / "orch.toml"
    config = load(EvaluateConfig, ["@", str(file), "--inference.port", "8123"])
    assert config.inference.port == 8123
    with pytest.raises(UsageError, match="all roles share this value"):
        load(EvaluateConfig, ["--inference.model.name", "x"])
