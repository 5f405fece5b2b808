"""Reinforcement learning from the outside, against one server that stays up while runs come and go."""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import sqlite3
import statistics
from dataclasses import dataclass
from pathlib import Path

import draws
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from runs import (
    CONFIGS,
    DEADLINE,
    LOOPBACK,
    Finished,
    Server,
    Shell,
    flip,
    printed,
    read,
    rows,
    step_folder,
    steps,
    untimed,
    whole_rows,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import cairn
from cairn.api.reading import load_checkpoint
from cairn.inference.client import InferenceClient, ServerStatus
from cairn.orchestrator.rollout_log import KeptRollouts
from cairn.policy.generation import Generation, SamplingParams
from cairn.policy.receiver import read_source
from cairn.run.batches import batch_path, read_batch
from cairn.run.connections import free_port
from cairn.run.directory import RunDirectory
from cairn.run.messages import WEIGHT_SOURCE, BatchHeader
from cairn.run.seeds import answer_seed

pytestmark = pytest.mark.timeout(900)

PROMPTS, SAMPLES = 8, 8
"""Of a step; half as many prompts as orch.toml has."""
FILES = ("--trainer", f"@{CONFIGS}/train.toml", "--orchestrator", f"@{CONFIGS}/orch.toml")
FILES = (*FILES, "--orchestrator.prompts-per-step", PROMPTS)


def rise(run: Path) -> float:
    """Mean reward of the last three steps less that of the first three."""
    rewards = [row["reward/mean"] for row in rows(run)]
    return statistics.fmean(rewards[-3:]) - statistics.fmean(rewards[:3])


ROLES = ("trainer", "trainer_rank0", "orchestrator")


def states(roles: dict) -> dict[str, str]:
    """Each role's state, as roles.json has it."""
    return {role: entry["state"] for role, entry in roles["roles"].items()}


def status(server: Server) -> ServerStatus:
    """What the server reports."""
    return server.ask(lambda client: client.status())


def push(server: Server, model: Path, version: str) -> dict[str, str]:
    """Put a model into the server; returns the checksums of its weights."""

    async def job(client):
        await client.update_weights(model, version)
        return await client.weight_checksums()

    return server.ask(job)


# A run in two halves, with strange weights in the server between them


@dataclass(frozen=True)
class Halves:
    """A run of 10 steps, resumed to 20 with a server that had other weights meanwhile."""

    run: Path
    environment: dict
    asked: list[int]
    """The problems that were asked for, in order."""
    asked_before: int
    """How many of them in the first half."""
    version_before: str
    checksums_before: dict[str, str]
    status_at_first_prompt: ServerStatus
    checksums_at_first_prompt: dict[str, str]
    checksums_of_10: dict[str, str]
    status_after: ServerStatus
    checksums_after: dict[str, str]


@pytest.fixture(scope="module")
def halves(shell: Shell, server: Server, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Halves:
    """An epoch is 20 steps long."""
    folder = tmp_path_factory.mktemp("halves")
    run, problems = folder / "run", folder / "problems"
    environment = {"folder": folder, "problems": 20 * PROMPTS, "min_length": 3, "max_length": 8, "seed": 1}
    arguments = (
        *("rl", *FILES, "--model.name", step_folder(trained, 200), "--output-dir", run, "--ckpt"),
        *("--orchestrator.inference-url", server.url),
        *("--orchestrator.environment.name", "observed:Observed"),
        *("--orchestrator.environment.args", json.dumps(environment, default=str)),
        *("--trainer.keep-batches-gb", 1),
    )
    shell.succeed(*arguments, "--max-steps", 10)
    asked_before = len(problems.read_text().split())
    version_before = status(server).weight_version
    checksums_of_10 = push(server, step_folder(run, 10) / "model", "test:10")
    checksums_before = push(server, step_folder(trained, 100) / "model", "test:other")

    (folder / "hold").touch()
    with shell.start(*arguments, "--max-steps", 20, "--ckpt.resume-step", 10) as command:
        command.wait_until((folder / "held").exists)
        at_first_prompt = status(server)
        checksums_at_first_prompt = server.ask(lambda client: client.weight_checksums())
        (folder / "hold").unlink()
        finished = command.finish()
        assert finished.code == 0, finished.output
    return Halves(
        run=run,
        environment=environment,
        asked=[int(problem) for problem in problems.read_text().split()],
        asked_before=asked_before,
        version_before=version_before,
        checksums_before=checksums_before,
        status_at_first_prompt=at_first_prompt,
        checksums_at_first_prompt=checksums_at_first_prompt,
        checksums_of_10=checksums_of_10,
        status_after=status(server),
        checksums_after=server.ask(lambda client: client.weight_checksums()),
    )


def test_its_steps_are_taken_again_on_the_batches_that_it_kept(shell: Shell, halves: Halves):
    """Without orchestrator and server: the same rows, weights and moments; a lost batch is named."""
    found = printed(shell.succeed("ckpt", "replay", halves.run, "--json"))
    assert (found["start"], found["last"], found["verdict"]) == (10, 20, "same")
    assert found["tensors"] > 100
    lost = batch_path(halves.run / "trained", 12)
    aside = lost.rename(lost.with_suffix(".aside"))
    ended = shell.run("ckpt", "replay", halves.run, "--step", 11)
    aside.rename(lost)
    assert ended.code == 2
    assert "the batches of step 12 are not kept" in ended.output
    assert "--trainer.keep-batches-gb" in ended.output


def test_its_answers_are_drawn_again_and_a_flipped_bit_of_a_server_is_found(
    shell: Shell, server: Server, halves: Halves, tmp_path: Path
):
    """To the bit, with the run's seeds; a bit of a weight shows in an answer, and in the server's memory. The
    server gets its weights back, if they are still there."""
    kept, policy = KeptRollouts(halves.run / "rollouts"), RunDirectory(halves.run).attempt().version(10)
    row = next(row for row in kept.read(11) if row["failed"] is None)
    arguments = ("ckpt", "replay", halves.run, "--rollout", f"11/{row['place']}/{row['sample']}")
    arguments += ("--server", server.url, "--bound", 0)
    checksums = push(server, step_folder(halves.run, 20) / "model", "test:given")
    had = status(server)
    found = printed(shell.succeed(*arguments, "--json"))
    assert status(server) == had, "it has its weights back"
    assert server.ask(lambda client: client.weight_checksums()) == checksums
    assert (found["verdict"], found["altered"]) == ("same", [])
    assert [(one["tokens"], one["drawn_again"], one["policy"]) for one in found["spans"]] == [
        (len(row["turns"][0]["token_ids"]), True, policy)
    ]
    model = tmp_path / "model"
    shutil.copytree(step_folder(halves.run, 10) / "model", model)
    flip(model / "model.safetensors", (model / "model.safetensors").stat().st_size - 2, mask=0x40)

    async def answer(client: InferenceClient) -> Generation:
        await client.update_weights(model, policy)
        prompt, seed = row["turns"][0]["prompt_ids"], answer_seed(0, row["place"], 10, 0) + row["sample"]
        ends = SamplingParams(max_tokens=len(row["turns"][0]["token_ids"]), seed=seed)
        return (await client.generate(prompt, ends))[0]

    wrong = server.ask(answer)
    shutil.rmtree(model)
    aside = shutil.copy(kept.path(11), tmp_path)
    table = pq.read_table(kept.path(11))
    rows_of_11 = table.to_pylist(maps_as_pydicts="strict")
    (altered,) = [one for one in rows_of_11 if (one["place"], one["sample"]) == (row["place"], row["sample"])]
    altered["turns"][0] |= {"token_ids": wrong.token_ids, "logprobs": wrong.logprobs}
    altered["turns"][0]["versions"] = [{"version": policy, "start": 0, "end": len(wrong.token_ids)}]
    for one in rows_of_11:
        one["parts"] = [*one["parts"].items()]
    pq.write_table(pa.Table.from_pylist(rows_of_11, schema=table.schema), kept.path(11))
    ended = shell.run(*arguments)
    shutil.copy(aside, kept.path(11))
    assert ended.code == 1, ended.output
    assert "it had other weights (one flipped bit is enough)" in ended.output
    assert f"keeps the policy that it was given last, in the place of {policy}" in ended.output
    (parameter,) = re.findall(r"the server held other values: \S*model\.(\S+)", ended.output)
    assert parameter in ("norm.weight", "layers.1.self_attn.qkv_proj.weight"), parameter


def test_a_resumed_run_samples_from_the_step_it_goes_on_from(halves: Halves):
    """When the first prompt is handed out, the server has step 10's weights, whatever it had before."""
    attempt = RunDirectory(halves.run).attempt()
    assert (attempt.number, attempt.start_step) == (2, 10)
    assert halves.version_before == attempt.version(10)
    assert halves.checksums_before != halves.checksums_of_10
    assert halves.status_at_first_prompt.weight_version == attempt.version(10)
    assert halves.checksums_at_first_prompt == halves.checksums_of_10


def test_every_prompt_of_the_epoch_is_seen_once(halves: Halves):
    """Over both halves; the second goes on in the order that the first began."""
    assert halves.asked_before == 10 * PROMPTS
    assert len(halves.asked) == 20 * PROMPTS
    assert sorted(halves.asked) == list(range(20 * PROMPTS))
    assert halves.asked != sorted(halves.asked)


def test_every_role_ends_well(halves: Halves):
    """As roles.json says."""
    assert states(read(halves.run / "roles.json")) == dict.fromkeys(ROLES, "done")


def test_metrics_hold_every_step_once(halves: Halves):
    """And count on from the first half."""
    found = whole_rows(halves.run, 20)
    assert [row["total_problems"] for row in found] == [PROMPTS * step for step in range(1, 21)]
    assert [row["total_samples"] for row in found] == [PROMPTS * SAMPLES * step for step in range(1, 21)]
    assert found[9]["epoch"] == 0.5
    assert found[19]["epoch"] == 1
    tokens = [row["total_tokens"] for row in found]
    assert tokens == sorted(tokens)


def test_trainer_and_server_agree_on_every_token(halves: Halves):
    """They compute with the same weights at every step: no logprob differs by 1e-4, no ratio from 1."""
    for row in whole_rows(halves.run, 20):
        assert 0 < row["mismatch/logprob_max"] < 1e-4, row["step"]
        assert row["ratio/mean"] == pytest.approx(1, abs=1e-4)
        assert row["ratio/clipped"] == 0


def test_a_checkpoint_spans_trainer_and_orchestrator(halves: Halves):
    """One manifest lists the parts of both, and both count the same."""
    assert steps(halves.run) == [10, 20]
    for step in (10, 20):
        folder = step_folder(halves.run, step)
        manifest = read(folder / "manifest.json")
        assert sorted(manifest["parts"]) == ["orchestrator", "trainer"]
        names = set(manifest["files"])
        assert {"orchestrator/state.json", "trainer/state.json", "model/config.json"} <= names
        assert names | {"manifest.json"} == {
            path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
        }
        row = rows(halves.run)[step - 1]
        assert manifest["metrics"]["reward/mean"] == row["reward/mean"]
        progress = read(folder / "orchestrator" / "state.json")["progress"]
        assert progress == {
            "step": step,
            "total_problems": step * PROMPTS,
            "total_samples": step * PROMPTS * SAMPLES,
            "total_tokens": row["total_tokens"],
        }
        trainer = read(folder / "trainer" / "state.json")["progress"]
        assert trainer == {key: progress[key] for key in ("step", "total_samples", "total_tokens")}


def test_a_checkpoint_opens_in_transformers_and_in_the_server(halves: Halves, server: Server):
    """Both give the same logprobs, and the server had these very weights when the run ended."""
    model = step_folder(halves.run, 20) / "model"
    assert halves.status_after.weight_version == RunDirectory(halves.run).attempt().version(20)
    assert push(server, model, "test:20") == halves.checksums_after != halves.checksums_of_10
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "cairn"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    (answer,) = server.ask(
        lambda client: client.generate(prompt, SamplingParams(max_tokens=8, seed=1, stop_token_ids=(1,)))
    )
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = network(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-4, rtol=0)


def test_its_steps_are_evaluated_afterwards_also_by_a_command_that_is_killed(
    shell: Shell, server: Server, halves: Halves, tmp_path: Path
):
    """With the same numbers, and nothing that was answered is asked for again."""
    environment = json.dumps({"problems": 80, "min_length": 3, "max_length": 8, "seed": 9})
    arguments = ("eval", "--all", halves.run, "--inference-url", server.url, "--samples", 4)
    arguments += ("--env.name", "reverse_text", "--env.args", environment, "--max-in-flight", 8)
    shell.succeed(*arguments, "--out", tmp_path / "whole")
    killed = tmp_path / "killed"
    with shell.start(*arguments, "--out", killed) as command:
        command.wait_until(lambda: answers_in(killed) > 40)
        command.process.send_signal(signal.SIGKILL)
        command.process.wait()
    before = answers_in(killed)
    shell.succeed(*arguments, "--out", killed)
    whole, again = ([untimed_result(row) for row in results(out)] for out in (tmp_path / "whole", killed))
    assert [row["step"] for row in whole] == [10, 20]
    assert whole == again
    assert before > 40
    assert whole[0]["reward"] < whole[1]["reward"]
    found = shell.succeed("rollouts", next((tmp_path / "whole").glob("run-*")) / "reverse_text", "--json")
    assert len(json.loads(found)) == 2 * 80 * 4


def answers_in(out: Path) -> int:
    """Answers with a reward in the ledgers of an evaluation."""
    count = 0
    for ledger in (out / "ledgers").glob("*.sqlite"):
        opened = contextlib.closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True))
        with opened as database, contextlib.suppress(sqlite3.OperationalError):  # it is being made
            query = "SELECT count(*) FROM samples WHERE reward IS NOT NULL"
            count += database.execute(query).fetchone()[0]
    return count


def results(out: Path) -> list[dict]:
    """The rows of evals.jsonl."""
    return [json.loads(line) for line in (out / "evals.jsonl").read_text().splitlines()]


def untimed_result(row: dict) -> dict:
    """A result without the time that it took."""
    return {key: value for key, value in row.items() if key != "seconds"}


def test_reward_rises_over_two_halves(halves: Halves):
    """Seed 0."""
    assert rise(halves.run) > 0.1, [row["reward/mean"] for row in rows(halves.run)]


# Ends that are not good


@dataclass(frozen=True)
class Stopped:
    """A run of 20 steps whose orchestrator was asked to stop, whose launcher was killed when it went on, and
    that two commands, one a role, then took to its end."""

    run: Path
    finished: Finished
    stopped_at: int
    roles_at_stop: dict
    rows_at_stop: list[dict]
    steps_at_stop: list[int]
    newest: int
    """The newest checkpoint when the launcher had been killed."""
    rows_at_kill: list[dict]
    headers_at_kill: dict[int, BatchHeader]
    roles_at_kill: dict


@pytest.fixture(scope="module")
def stopped(shell: Shell, server: Server, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """Seed 1."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    shared = ("--model.name", step_folder(trained, 200), "--output-dir", run, "--max-steps", 20, "--seed", 1)
    rl = ("rl", *FILES, *shared, "--orchestrator.inference-url", server.url, "--ckpt.interval", 3)
    rl += ("--trainer.keep-tokens-gb", 1)
    with shell.start(*rl) as command:
        command.wait_until(lambda: len(rows(run)) >= 4)
        os.kill(read(run / "roles.json")["roles"]["orchestrator"]["pid"], signal.SIGTERM)
        finished = command.finish()
        command.assert_nothing_survives()
    at_stop = {
        "rows_at_stop": rows(run),
        "roles_at_stop": read(run / "roles.json"),
        "steps_at_stop": steps(run),
    }
    stopped_at = len(rows(run))
    with shell.start(*rl, "--ckpt.resume", "auto") as command:
        command.wait_until(lambda: len(rows(run)) >= stopped_at + 2)
        command.family()
        roles = read(run / "roles.json")
        command.process.kill()
        command.process.wait()
        command.assert_nothing_survives()
    there = {step: batch_path(run / "batches", step) for step in range(1, 21)}
    result = Stopped(
        run=run,
        finished=finished,
        stopped_at=stopped_at,
        **at_stop,
        newest=steps(run)[-1],
        rows_at_kill=rows(run),
        headers_at_kill={step: read_batch(path).header for step, path in there.items() if path.exists()},
        roles_at_kill=roles,
    )
    assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
    of_trainer = ("@", f"{CONFIGS}/train.toml", "--ckpt.interval", 3, "--ckpt.resume", "auto")
    of_trainer += ("--keep-tokens-gb", 1)
    of_orchestrator = ("@", f"{CONFIGS}/orch.toml", "--inference-url", server.url)
    of_orchestrator += ("--prompts-per-step", PROMPTS)
    with (
        shell.start("trainer", *of_trainer, *shared) as trainer,
        shell.start("orchestrator", *of_orchestrator, *shared) as orchestrator,
    ):
        assert trainer.finish().code == 0, trainer.output
        assert orchestrator.finish().code == 0, orchestrator.output
    return result


def test_an_interrupt_saves_both_parts_at_the_next_step_boundary(stopped: Stopped):
    """SIGTERM to the orchestrator alone: exit code 75, a whole checkpoint of the last step, how to go on."""
    assert stopped.finished.code == 75, stopped.finished.output
    folder = step_folder(stopped.run, stopped.stopped_at)
    assert f"stopped at step {stopped.stopped_at}, saved in {folder}" in stopped.finished.output
    assert "--ckpt.resume auto" in stopped.finished.output
    assert stopped.stopped_at < 20
    assert stopped.steps_at_stop == sorted({*range(3, stopped.stopped_at, 3), stopped.stopped_at})
    assert states(stopped.roles_at_stop) == dict.fromkeys(ROLES, "stopped")


def test_a_stop_does_not_wait_for_a_batch(
    shell: Shell, server: Server, trained: Path, halves: Halves, tmp_path: Path
):
    """A rollout that takes for ever: both parts of the step before are saved, and the run goes on to the bit.

    The environment is never asked again for what was answered.
    """
    run = tmp_path / "run"
    environment = {**halves.environment, "folder": tmp_path}
    arguments = (
        *("rl", *FILES, "--model.name", step_folder(trained, 200), "--output-dir", run, "--max-steps", 10),
        *("--orchestrator.inference-url", server.url, "--ckpt"),
        *("--orchestrator.environment.name", "observed:Observed"),
        *("--orchestrator.environment.args", json.dumps(environment, default=str)),
    )
    with shell.start(*arguments) as command:
        command.wait_until(lambda: rows(run))  # no later: after 10 steps there is nothing to hold
        (tmp_path / "hold_some").touch()
        command.wait_until((tmp_path / "held").exists)
        last = len(rows(run))
        command.wait_until(lambda: "batch" in read(run / "heartbeats" / "trainer_rank0.json")["doing"])
        os.kill(read(run / "roles.json")["roles"]["trainer"]["pid"], signal.SIGTERM)
        finished = command.finish()
        command.assert_nothing_survives()
    assert finished.code == 75, finished.output
    stopped_at = len(rows(run))
    assert last <= stopped_at < 10
    assert f"stopped at step {stopped_at}, saved in {step_folder(run, stopped_at)}" in finished.output
    assert steps(run) == [stopped_at]
    assert states(read(run / "roles.json")) == dict.fromkeys(ROLES, "stopped")
    (tmp_path / "hold_some").unlink()
    shell.succeed(*arguments, "--ckpt.resume", "auto")
    assert untimed(whole_rows(run, 10)) == untimed(rows(halves.run)[:10])
    for file in ("model/model.safetensors", "trainer/optimizer.safetensors"):
        assert (step_folder(run, 10) / file).read_bytes() == (step_folder(halves.run, 10) / file).read_bytes()


def test_an_interrupted_run_goes_on(stopped: Stopped):
    """Each step stands once in the metrics, those before the stop as they were, and the reward rises."""
    found = whole_rows(stopped.run, 20)
    assert found[: stopped.stopped_at] == stopped.rows_at_stop
    assert all(row["mismatch/logprob_max"] < 1e-4 for row in found)
    assert rise(stopped.run) > 0.1, [row["reward/mean"] for row in found]


def test_no_role_outlives_a_killed_launcher(stopped: Stopped):
    """SIGKILL of `rl`: its roles die with it (see the fixture), and the server, which is not its, lives."""
    assert states(stopped.roles_at_kill) == dict.fromkeys(ROLES, "running")
    for role in stopped.roles_at_kill["roles"].values():
        assert not Path(f"/proc/{role['pid']}").exists()


def test_batches_are_kept_until_a_checkpoint_makes_them_needless(stopped: Stopped, halves: Halves):
    """Each names the policy that it was sampled from, which is the newest there was."""
    assert set(range(stopped.newest + 1, len(stopped.rows_at_kill) + 1)) <= stopped.headers_at_kill.keys()
    assert not list((stopped.run / "batches").iterdir())
    assert not list((halves.run / "batches").iterdir())
    attempt = RunDirectory(stopped.run).attempt()
    for step, header in stopped.headers_at_kill.items():
        assert (header.run_id, header.step) == (attempt.run_id, step)
        assert header.version == attempt.version(step - 1)
        assert len(set(header.problems)) == PROMPTS


def test_roles_started_one_by_one_go_on_from_the_newest_checkpoint(stopped: Stopped):
    """`trainer` and `orchestrator` repeat what the kill undid, to the bit."""
    found = whole_rows(stopped.run, 20)
    assert RunDirectory(stopped.run).attempt().start_step == stopped.newest
    assert len(stopped.rows_at_kill) >= stopped.stopped_at + 2
    assert untimed(found[: len(stopped.rows_at_kill)]) == untimed(stopped.rows_at_kill)
    assert steps(stopped.run)[-1] == 20


def test_what_was_computed_of_each_token_is_there_once(stopped: Stopped):
    """Of every step, also of those that the kills undid, as the metrics of the step have it."""
    run = cairn.Run(stopped.run)
    for row in whole_rows(stopped.run, 20):
        tokens = run.tokens(row["step"])
        assert int(tokens["learned"].sum()) == row["learned_tokens"]
        largest = tokens["gap"].abs().max()
        assert largest == pytest.approx(row["mismatch/logprob_max"], rel=1e-6)
        assert tokens["ratio"][tokens["learned"]].mean() == pytest.approx(row["ratio/mean"], abs=1e-5)


def test_an_audit_finds_every_prompt_trained_once(shell: Shell, halves: Halves, stopped: Stopped):
    """Over whatever happened to these runs: 20 batches, none repeated, none missing, none waiting."""
    for run in (halves.run, stopped.run):
        report = json.loads(shell.succeed("ckpt", "audit", run, "--json"))
        assert report["ok"]
        assert (report["first_step"], report["last_step"]) == (1, 20)
        assert sum(epoch["trained"] for epoch in report["epochs"]) == 20 * PROMPTS
        for epoch in report["epochs"]:
            assert (epoch["waiting"], epoch["repeated"], epoch["missing"]) == (0, 0, 0)


# Generating while training


def assert_proven(run: Path, last: int, found: list[dict]) -> None:
    """The trainer wrote what the server had to prove itself by, and it did so with all that was sampled from.

    Policies that came while it was busy are passed over.
    """
    probe = read(run / "weights" / f"v{last}" / "probe.json")
    assert len(probe["token_ids"]) == len(probe["logprobs"]) + 1 == 32
    assert [row["servers/quarantined"] for row in found] == [0] * last
    assert not any(key.startswith("servers/disagreed") for row in found for key in row)
    proofs = re.findall(r"has proven version (\S+)", (run / "logs" / "orchestrator.log").read_text())
    attempt = RunDirectory(run).attempt()
    sampled = {row["step"] - 1 - int(row["staleness/max"]) for row in found}
    assert {attempt.version(step) for step in sampled} <= set(proofs)


def test_overlapped_and_in_pieces_every_prompt_is_trained_once(
    shell: Shell, server: Server, trained: Path, tmp_path: Path
):
    """One step of staleness, answers asked for in pieces of four tokens, the orchestrator killed between, and
    strangers at all ports of the run."""
    run = tmp_path / "run"
    arguments = (
        *("rl", *FILES, "--model.name", step_folder(trained, 200), "--output-dir", run, "--max-steps", 14),
        *("--seed", 5, "--orchestrator.inference-url", server.url, "--ckpt.interval", 6),
        *("--trainer.keep-batches-gb", 1),
        *("--orchestrator.max-off-policy-steps", 1, "--orchestrator.sampling.chunk-tokens", 4),
        *("--trainer.loss.importance", "token_truncate", "--trainer.weight-transport", "network"),
    )
    with shell.start(*arguments) as command, contextlib.ExitStack() as strangers:
        command.wait_until(lambda: len(rows(run)) >= 4)
        ports = command.listening()
        assert {address for address, _ in ports} <= LOOPBACK
        published = command.wait_until(lambda: [*run.glob(f"weights/*/{WEIGHT_SOURCE}")])
        source = read_source(published[0].parent)
        assert source
        assert ("127.0.0.1", source.ranks[0].port) in ports
        for address in sorted(ports):
            for says in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(500)):
                with contextlib.suppress(ConnectionError):
                    stranger = strangers.enter_context(socket.create_connection(address, DEADLINE))
                    stranger.sendall(says)
        os.kill(read(run / "roles.json")["roles"]["orchestrator"]["pid"], signal.SIGKILL)
        finished = command.finish()
    assert finished.code == 0, finished.output
    assert "orchestrator died" in finished.output
    assert "trainer died" not in finished.output
    found = whole_rows(run, 14)
    staleness = [row["staleness/max"] for row in found]
    assert staleness[0] == 0
    assert set(staleness) == {0, 1}
    assert statistics.fmean(staleness) > 0.5, "it was hardly ever ahead"
    assert_proven(run, 14, found)
    assert all(row["rollout/tokens"] > 4 * PROMPTS * SAMPLES for row in found[-3:])  # several pieces each
    assert rise(run) > 0.05, [row["reward/mean"] for row in found]
    report = json.loads(shell.succeed("ckpt", "audit", run, "--json"))
    assert report["ok"], report
    assert sum(epoch["trained"] for epoch in report["epochs"]) == 14 * PROMPTS
    # An answer of two policies, of which one is made again: transformers has the keys that the server kept.
    kept = (row for step in range(7, 15) for row in KeptRollouts(run / "rollouts").read(step))
    mixed = next(row for row in kept if len({one["version"] for one in row["turns"][0]["versions"]}) > 1)
    key = f"{mixed['step']}/{mixed['place']}/{mixed['sample']}"
    again = ("ckpt", "replay", run, "--rollout", key, "--json")
    replayed = printed(shell.succeed(*again, "--server", server.url))
    assert replayed["ok"]
    assert any(one["by_transformers"] for one in replayed["spans"])
    assert all(one["mean_difference"] < 1e-5 for one in replayed["spans"] if one["verdict"]), replayed
    assert all(one["verdict"] for one in replayed["spans"]), replayed


@draws.in_turn("policies that servers get", 0, 2)
def test_two_ranks_send_the_server_their_shards(shell: Shell, server: Server, trained: Path, tmp_path: Path):
    """It computes what they do at every step, as `mismatch` says; only the last policy is written down. The
    ranks share the matrices of layers, so that they hold rows of some and columns of others.

    The saved step is exported meanwhile, and the server takes it, too.
    """
    run = tmp_path / "run"
    shell.succeed(
        *("rl", *FILES, "--model.name", step_folder(trained, 200), "--output-dir", run, "--max-steps", 5),
        *("--trainer.workers", 2, "--trainer.weight-transport", "network", "--ckpt"),
        *("--trainer.weight-encoding", "delta"),
        *("--trainer.parallel.tensor", 2, "--trainer.keep-tokens-gb", 1),
        *("--ckpt.export.dtype", "bfloat16", "--ckpt.export.shard-size", "500K"),
        *("--trainer.loss.entropy-coef", 0.001, "--trainer.loss.importance", "sequence_mask"),
        *("--orchestrator.advantage.type", "reinforce_plus_plus_baseline"),
        *("--orchestrator.inference-url", server.url),
    )
    found = whole_rows(run, 5)
    for row in found:
        assert 0 < row["mismatch/logprob_max"] < 1e-4, row["step"]
        assert (row["weights/bytes"] > 2e6) == (row["step"] <= 2), "the first two are whole"
        assert row["importance/mean"] == pytest.approx(1, abs=1e-3)
        assert 0 < row["entropy"] < 5
        assert row["advantage/std"] == pytest.approx(1, abs=1e-4)
        tokens = cairn.Run(run).tokens(row["step"])
        assert int(tokens["learned"].sum()) == row["learned_tokens"]
        assert tokens["entropy"].mean() == pytest.approx(row["entropy"], rel=1e-4)
    assert {row["staleness/max"] for row in found} == {0}
    assert_proven(run, 5, found)
    assert set(read(run / "weights" / "v5" / "checksums.json")) == set(
        load_file(run / "weights/v5/model.safetensors")
    )
    expected = push(server, step_folder(run, 5) / "model", "test:5")
    attempt = RunDirectory(run).attempt()
    assert list((run / "weights").glob("v*/*.safetensors")) == [run / "weights/v5/model.safetensors"]
    assert push(server, run / "weights" / "v5", attempt.version(5)) == expected
    assert_exported(run, 5)
    push(server, run / "exports" / "step_5", "test:exported")


def test_a_critic_learns_and_a_killed_run_goes_on_with_it(
    shell: Shell, server: Server, trained: Path, tmp_path: Path
):
    """On two ranks that share the tokens of each row, with two updates a step; the steps after the checkpoint
    come out the same again. The server, which gets deltas from both ranks through an object store, finds its
    own logprobs of each policy to be the trainer's, also when the trainer is killed while it puts one there.
    """
    run, store = tmp_path / "run", tmp_path / "store"
    arguments = (
        *("rl", *FILES, "--model.name", step_folder(trained, 200), "--output-dir", run),
        *("--trainer.workers", 2, "--trainer.updates-per-batch", 2, "--ckpt.interval", 3),
        *("--trainer.parallel.context", 2, "--trainer.weight-encoding", "delta"),
        *("--trainer.weight-transport", "store", "--ckpt.remote", f"file://{store}"),
        *("--orchestrator.advantage.type", "gae", "--trainer.critic.warmup-steps", 2),
        *("--trainer.critic.optimizer.lr", 1e-3, "--orchestrator.inference-url", server.url),
    )
    (fault := tmp_path / "once" / "policy.stored_files:kill@3").parent.mkdir()
    fault.touch()
    faults = {"CAIRN_FAULT": fault.name, "CAIRN_FAULT_ONCE": str(fault.parent)}
    with shell.start(*arguments, "--max-steps", 1000, environment=faults) as command:
        command.wait_until(lambda: len(rows(run)) >= 5)
        assert not fault.exists()
        roles = read(run / "roles.json")
        assert states(roles) == dict.fromkeys((*ROLES, "trainer_rank1", "uploader"), "running")
        assert {role["pid"] for role in roles["roles"].values()} <= {pid for pid, _ in command.family()}
        command.process.kill()
        command.process.wait()
        command.assert_nothing_survives()
    at_kill = rows(run)
    last = max(7, len(at_kill) + 1)
    shell.succeed(*arguments, "--max-steps", last, "--ckpt.resume", "auto")
    found = whole_rows(run, last)
    assert untimed(found[: len(at_kill)]) == untimed(at_kill)
    assert ["loss" in row for row in found] == [False] * 2 + [True] * (last - 2)
    whole = max(row["weights/bytes"] for row in found)
    assert min(row["weights/bytes"] for row in found[2:]) < 0.9 * whole
    in_store = {path.name for path in (store / "policies").glob("*/v*") if any(path.iterdir())}
    assert f"v{last}" in in_store <= {f"v{step}" for step in range(last + 1)}
    losses = [row["critic/loss"] for row in found]
    assert max(losses[-3:]) < losses[0], losses
    assert found[0]["values/mean"] == 0 < found[-1]["values/mean"]
    assert {path.name for path in (step_folder(run, 6) / "trainer" / "critic").iterdir()} == {
        "config.json",
        "model.safetensors",
        "optimizer.safetensors",
    }
    assert json.loads(shell.succeed("ckpt", "audit", run, "--json"))["ok"]


def assert_exported(run: Path, step: int) -> None:
    """The run's export has the step's weights in bfloat16 in several files, and the exporter ended well."""
    assert states(read(run / "roles.json"))["exporter"] == "done"
    assert [folder.name for folder in (run / "exports").glob("step_*")] == [f"step_{step}"]
    exported = run / "exports" / f"step_{step}"
    assert len(list(exported.glob("*.safetensors"))) > 1
    found = AutoModelForCausalLM.from_pretrained(exported)
    assert found.dtype == torch.bfloat16
    saved = AutoModelForCausalLM.from_pretrained(step_folder(run, step) / "model", dtype=torch.bfloat16)
    assert found.state_dict().keys() == saved.state_dict().keys()
    for name, tensor in saved.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


@draws.in_turn("policies that servers get", 1, 2)
def test_policies_in_bfloat16_are_the_same_to_servers_after_a_resume(
    shell: Shell, server: Server, trained: Path, tmp_path: Path
):
    """Though checkpoint and server are float32: an interrupted run computes what a whole one does."""
    arguments = (
        *("rl", *FILES, "--model.name", step_folder(trained, 200), "--ckpt"),
        *("--trainer.publish-dtype", "bfloat16", "--orchestrator.max-off-policy-steps", 0),
        *("--orchestrator.inference-url", server.url),
    )
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    shell.succeed(*arguments, "--output-dir", whole, "--max-steps", 4)
    shell.succeed(*arguments, "--output-dir", halves, "--max-steps", 2)
    shell.succeed(*arguments, "--output-dir", halves, "--max-steps", 4, "--ckpt.resume-step", 2)
    keys = ("step", "loss", "grad_norm", "batch/digest", "reward/mean", "mismatch/logprob")
    found, expected = whole_rows(halves, 4), whole_rows(whole, 4)
    assert [[row[key] for key in keys] for row in found] == [[row[key] for key in keys] for row in expected]
    assert all(row["mismatch/logprob_max"] > 1e-4 for row in found[1:]), "the server has rounded weights"
    assert {row["servers/quarantined"] for row in found} == {0}
    file = "model/model.safetensors"
    assert (step_folder(halves, 4) / file).read_bytes() == (step_folder(whole, 4) / file).read_bytes()
    assert {t.dtype for t in load_file(step_folder(whole, 4) / file).values()} == {torch.float32}
    published = AutoModelForCausalLM.from_pretrained(whole / "weights" / "v4")
    assert published.dtype == torch.bfloat16


# A server of the run's own


def test_a_run_with_a_server_of_its_own_leaves_no_process_behind(shell: Shell, tmp_path: Path):
    """`rl @ rl.toml` needs nothing else; SIGTERM to all processes saves both parts of the step done last.

    The server samples fewer answers at a time than a prompt has, so these are asked for in parts. One of the
    last part is drawn again, at a server of its own, to the bit. Every second commit executes all processes,
    as users do, where others fork them.
    """
    port, run = free_port(), tmp_path / "run"
    arguments = ("--max-steps", 100_000, "--ckpt", "--output-dir", run, "--inference.port", port)
    arguments += ("--inference.max-num-seqs", SAMPLES - 3)
    executed = draws.seed("a run of processes that are executed") % 2 == 0
    with shell.start("rl", "@", f"{CONFIGS}/rl.toml", *arguments, executed=executed) as command:
        command.wait_until(lambda: len(rows(run)) >= 2)
        for pid in (command.process.pid, *(pid for pid, _ in command.family())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        finished = command.finish()
        assert finished.code == 75, finished.output
        assert "vllm" in (run / "logs" / "vllm.log").read_text()
        command.assert_nothing_survives()
    (step,) = steps(run)
    assert f"stopped at step {step}, saved in" in finished.output
    assert "started again" not in finished.output.partition("stopping at the next step boundary")[2]
    whole_rows(run, step)
    assert '"ok": true' in shell.succeed("ckpt", "audit", run, "--json")
    assert read(step_folder(run, step) / "manifest.json")["parts"] == ["trainer", "orchestrator"]
    expected = dict.fromkeys(("inference", *ROLES), "stopped")
    assert states(read(run / "roles.json")) == expected
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
    place = KeptRollouts(run / "rollouts").read(1)[0]["place"]
    found = printed(shell.succeed("ckpt", "replay", run, "--rollout", f"1/{place}/{SAMPLES - 1}", "--json"))
    assert (found["server"], found["verdict"]) == ("a server of its own", "same")
    assert [(one["exact"], one["drawn_again"]) for one in found["spans"]] == [(True, True)]


@pytest.mark.parametrize("transport", draws.cases(["files", "network"], "adapters", 1))
def test_servers_get_an_adapter(shell: Shell, server: Server, trained: Path, tmp_path: Path, transport: str):
    """In files as it is, over the network merged and as deltas; after a resume, too, whatever the server had
    meanwhile."""
    run = tmp_path / "run"
    arguments = (
        *("rl", *FILES, "--model.name", step_folder(trained, 200), "--output-dir", run, "--ckpt"),
        *("--orchestrator.inference-url", server.url, "--trainer.weight-transport", transport),
        *("--trainer.lora.serve", "adapter" if transport == "files" else "merged"),
        *("--trainer.weight-encoding", "full" if transport == "files" else "delta"),
        *("--trainer.lora.rank", 4, "--trainer.optimizer.lr", 1e-2),
    )
    shell.succeed(*arguments, "--max-steps", 2)
    assert status(server).weight_version.endswith(":2")
    of_2 = server.ask(lambda client: client.weight_checksums())
    assert push(server, step_folder(trained, 100) / "model", "test:other") != of_2
    shell.succeed(*arguments, "--max-steps", 4, "--ckpt.resume-step", 2, "--trainer.workers", 2)
    assert status(server).weight_version.endswith(":4")
    of_4 = server.ask(lambda client: client.weight_checksums())
    assert all(math.isfinite(row["loss"]) for row in rows(run))
    place = KeptRollouts(run / "rollouts").read(3)[0]["place"]
    again = ("ckpt", "replay", run, "--rollout", f"3/{place}/0", "--server", server.url, "--json")
    (drawn,) = printed(shell.succeed(*again))["spans"]
    assert (drawn["first_other_token"], drawn["verdict"] in ("same", "close")) == (None, True), drawn

    merged = load_checkpoint(step_folder(run, 4)).tensors
    base = load_file(step_folder(trained, 200) / "model" / "model.safetensors")
    version = RunDirectory(run).versions.folder(4)
    whole = (step_folder(trained, 200) / "model" / "model.safetensors").stat().st_size
    if transport == "files":
        assert {path.name for path in version.glob("*.safetensors")} == {"adapter_model.safetensors"}
        assert sum(path.stat().st_size for path in version.glob("*.safetensors")) < whole / 10
        save_file(merged, tmp_path / "model.safetensors")
        assert push(server, tmp_path, "test:merged") == of_4
        return
    published = load_file(version / "model.safetensors")
    assert published.keys() == merged.keys() == base.keys()
    for name, tensor in published.items():
        torch.testing.assert_close(tensor, merged[name], rtol=1e-6, atol=1e-6)
        assert torch.equal(tensor, base[name]) == (not name.endswith("_proj.weight"))
