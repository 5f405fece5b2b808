"""A role that dies or hangs is started again alone, and the run ends as if nothing had happened."""

import contextlib
import os
import re
import signal
import socket
import time
from pathlib import Path

import draws
import psutil
import pytest
from families import make
from runs import (
    CONFIGS,
    LOOPBACK,
    Command,
    Server,
    Shell,
    as_of,
    assert_same_bits,
    flip,
    read,
    rows,
    step_folder,
    steps,
    tensors,
    untimed,
    whole_rows,
)
from toy import children

from cairn.run.batches import batch_path
from cairn.run.connections import free_port
from cairn.run.directory import RunDirectory

pytestmark = pytest.mark.timeout(900)

SILENCE = 20
HANG = ("--heartbeat-timeout", SILENCE)


def send(run: Path, role: str, number: signal.Signals) -> int:
    """Signal the process that roles.json names, which this test's command has started."""
    pid = read(run / "roles.json")["roles"][role]["pid"]
    os.kill(pid, number)
    return pid


def wait_for_successor(command: Command, run: Path, role: str, pid: int) -> None:
    """Wait until another process has taken the role."""

    def taken() -> bool:
        entry = read(run / "roles.json")["roles"][role]
        return entry["pid"] != pid and entry["state"] in ("running", "done")

    command.wait_until(taken)


def wait_for_spare(command: Command, run: Path) -> None:
    """Wait until a spare worker is ready."""
    command.wait_until(
        lambda: any(
            name.startswith("trainer_spare") and entry["state"] == "waiting"
            for name, entry in read(run / "roles.json")["roles"].items()
        )
    )


@pytest.fixture(scope="module")
def rl(trained: Path) -> tuple[object, ...]:
    """A short RL run's command line, but for the server and the output."""
    configs = ("--trainer", f"@{CONFIGS}/train.toml", "--orchestrator", f"@{CONFIGS}/orch.toml")
    return (
        *("rl", *configs, "--model.name", step_folder(trained, 100)),
        *("--max-steps", 12, "--seed", 3, "--ckpt.interval", 4, "--orchestrator.prompts-per-step", 8),
        *draws.environment(__name__),
    )


@pytest.fixture(scope="module")
def calm(
    shell: Shell, server: Server, rl: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """That run, undisturbed."""
    run = tmp_path_factory.mktemp("calm") / "run"
    shell.succeed(*rl, "--orchestrator.inference-url", server.url, "--output-dir", run)
    return run


def assert_same_run(stormy: Path, calm: Path) -> None:
    """The same metrics of every step and the same checkpoints, bit for bit."""
    assert untimed(whole_rows(stormy, 12)) == untimed(whole_rows(calm, 12))
    assert steps(stormy) == steps(calm) == [4, 8, 12]
    for step in steps(calm):
        assert_same_bits(tensors(step_folder(stormy, step)), tensors(step_folder(calm, step)))


@pytest.mark.smoke
def test_reinforcement_learning_survives_its_trainer_and_its_orchestrator(
    shell: Shell, server: Server, rl: tuple[object, ...], calm: Path, tmp_path: Path
):
    """One is killed and one stopped in the middle; all comes out to the bit, no step twice.

    The trainer goes on from a step in memory: at most the step in which it was killed is taken again.
    """
    run = tmp_path / "run"
    url = ("--orchestrator.inference-url", server.url, "--trainer.weight-encoding", "delta")
    url += ("--ckpt.memory-interval", 1)
    with shell.start(*rl, *url, *HANG, "--output-dir", run) as command:
        command.wait_until(lambda: len(rows(run)) >= 5)
        pid = send(run, "trainer", signal.SIGKILL)
        wait_for_successor(command, run, "trainer", pid)
        command.wait_until(lambda: len(rows(run)) >= 7)
        pid = send(run, "orchestrator", signal.SIGSTOP)
        wait_for_successor(command, run, "orchestrator", pid)
        finished = command.finish()
    assert finished.code == 0, finished.output
    assert "trainer died (exit code -9) and is started again" in finished.output
    assert f"orchestrator hung (no sign of life for {SILENCE} s" in finished.output
    assert "--heartbeat-timeout allows more) and is started again" in finished.output
    assert_same_run(run, calm)
    assert '"ok": true' in shell.succeed("ckpt", "audit", run, "--json")
    last = rows(run)[-1]
    assert [last[f"run/restarts{name}"] for name in ("/trainer", "/orchestrator", "")] == [1, 1, 2]
    assert last["run/recomputed_steps"] <= 1
    assert 0 < last["run/useful_seconds"] < last["run/wall_seconds"]
    assert re.search(rf"2 restarts, {last['run/recomputed_steps']} steps? recomputed", finished.output)


@draws.in_turn("a server that goes", 0, 2)
def test_policies_from_the_trainers_memory_survive_their_worker_and_come_back_to_a_server(
    shell: Shell, server: Server, rl: tuple[object, ...], calm: Path, trained: Path, tmp_path: Path
):
    """A worker is killed, and the server loses its weights to others: it gets them again, to the bit."""
    run = tmp_path / "run"
    network = ("--orchestrator.inference-url", server.url, "--trainer.weight-transport", "network")
    network += ("--trainer.weight-encoding", "delta")
    with shell.start(*rl, *network, "--output-dir", run) as command:
        command.wait_until(lambda: len(rows(run)) >= 3)
        server.ask(lambda client: client.update_weights(step_folder(trained, 100) / "model", "other"))
        command.wait_until(lambda: len(rows(run)) >= 6)
        send(run, "trainer_rank0", signal.SIGKILL)
        finished = command.finish()
    assert finished.code == 0, finished.output
    assert "trainer_rank0 died and is started again" in finished.output
    assert_same_run(run, calm)
    assert '"ok": true' in shell.succeed("ckpt", "audit", run, "--json")


MOMENTS = {
    "commit.before_manifest": "a rank of the trainer died",
    "orchestrator.before_part": "orchestrator died (exit code -9)",
    "commit.done": None,
}
"""Points of the last save, and why nothing is saved if a process dies there."""


@pytest.mark.parametrize("moment", draws.cases(list(MOMENTS), __name__, 1))
def test_a_process_dies_in_the_last_save_of_a_run_that_was_asked_to_stop(
    shell: Shell, server: Server, rl: tuple[object, ...], tmp_path: Path, moment: str
):
    """Nothing is started again, and nobody waits for the dead. What was not committed is done again from the
    same batches."""
    run = tmp_path / "run"
    once = tmp_path / "faults"
    once.mkdir()
    (once / f"{moment}:kill").touch()
    faults = {"CAIRN_FAULT": f"{moment}:kill", "CAIRN_FAULT_ONCE": str(once)}
    end = ("--orchestrator.inference-url", server.url, "--ckpt.interval", 1000, "--output-dir", run)
    with shell.start(*rl, *end, environment=faults) as command:
        command.wait_until(lambda: len(rows(run)) >= 2)
        command.process.send_signal(signal.SIGTERM)
        finished = command.finish()
    assert finished.code == 75, finished.output
    assert "started again" not in finished.output
    assert not list(once.iterdir())
    last = rows(run)[-1]["step"]
    if (why := MOMENTS[moment]) is None:
        assert f"stopped at step {last}, saved in" in finished.output
        assert steps(run) == [last]
    else:
        assert f"step {last} could not be saved ({why})" in finished.output
        assert steps(run) == []
        shell.succeed(*rl, *end, "--ckpt.resume", "auto", "--max-steps", last + 1)
        whole_rows(run, last + 1)
    assert '"ok": true' in shell.succeed("ckpt", "audit", run, "--json")


@draws.in_turn("a damaged checkpoint in RL", 0, 2)
def test_a_worker_dies_whose_newest_checkpoint_is_damaged(
    shell: Shell, server: Server, rl: tuple[object, ...], calm: Path, tmp_path: Path
):
    """The batches since the one before it are gone: the command begins another attempt from there. Before,
    a policy was damaged on its way to the server, for which it goes on from the newest checkpoint."""
    run = tmp_path / "run"
    url = ("--orchestrator.inference-url", server.url)
    with shell.start(*rl, *url, "--output-dir", run) as command:
        command.wait_until(lambda: len(rows(run)) >= 4)
        altered = damage_a_policy(command, run, server)
        command.wait_until(lambda: read(run / "roles.json")["number"] == 2)
        command.wait_until(lambda: steps(run)[-1:] == [8])
        send(run, "trainer_rank0", signal.SIGSTOP)
        tensor_file = step_folder(run, 8) / "model" / "model.safetensors"
        flip(tensor_file, tensor_file.stat().st_size - 1)
        send(run, "trainer_rank0", signal.SIGKILL)
        finished = command.finish()
    assert finished.code == 0, finished.output
    assert f"the policy of step {altered} is not as the trainer wrote it: {server.url}: " in finished.output
    assert "its newest checkpoint is damaged" in finished.output
    assert "passing over a damaged checkpoint" in finished.output
    assert_same_run(run, calm)
    assert read(run / "roles.json")["number"] == 3
    assert (run / "checkpoints" / "abandoned" / "before_attempt_3" / "step_8").is_dir()
    assert rows(run)[-1]["run/recomputed_steps"] >= 4
    assert '"ok": true' in shell.succeed("ckpt", "audit", run, "--json")


def damage_a_policy(command: Command, run: Path, server: Server) -> int:
    """Flip a bit of a policy that the trainer has published, and the server not loaded; returns its step."""

    def damaged(step: int) -> bool:
        command.wait_until(batch_path(run / "batches", step).exists)
        pid = send(run, "orchestrator", signal.SIGSTOP)
        command.wait_until((run / "weights" / f"v{step}.json").exists)
        served = server.ask(lambda client: client.status()).weight_version
        if not served.endswith(f":{step}"):
            file = run / "weights" / f"v{step}" / "model.safetensors"
            flip(file, file.stat().st_size - 1)
        os.kill(pid, signal.SIGCONT)
        return not served.endswith(f":{step}")

    while not damaged(step := len(rows(run)) + 1):
        pass
    return step


@draws.in_turn("a damaged checkpoint in RL", 1, 2)
def test_a_run_whose_checkpoint_the_trainer_finds_damaged(
    shell: Shell, server: Server, rl: tuple[object, ...], calm: Path, tmp_path: Path
):
    """Both roles go back to the step before; a step that the user names is an error, and nothing is lost.

    On one rank; test_damaged_start.py has two.
    """
    run = as_of(8, calm, tmp_path / "run")
    url = ("--orchestrator.inference-url", server.url, "--output-dir", run)
    weights, ledger = (
        step_folder(run, 8) / name for name in ("model/model.safetensors", "orchestrator/ledger.sqlite")
    )
    for file in (ledger, weights):
        flip(file, file.stat().st_size - 1)
        finished = shell.run(*rl, *url, "--ckpt.resume-step", 8)
        assert finished.code == 2, finished.output
        assert f"error: can't resume: {file}: changed between bytes" in finished.output
        assert (steps(run), len(rows(run))) == ([4, 8], 8)
        if file == ledger:
            flip(file, file.stat().st_size - 1)
    output = shell.succeed(*rl, *url, "--ckpt.resume", "auto")
    assert f"passing over a damaged checkpoint: {weights}: changed between bytes" in output
    assert f"the newest good checkpoint is {step_folder(run, 4)}" in output
    assert_same_run(run, calm)
    assert '"ok": true' in shell.succeed("ckpt", "audit", run, "--json")


@draws.in_turn("a server that goes", 1, 2)
def test_reinforcement_learning_survives_the_server_that_it_started(
    shell: Shell, rl: tuple[object, ...], calm: Path, tmp_path: Path
):
    """One of two servers is killed in the middle; the next one in its place gets the weights of that moment.

    The answers are those of a single server, to the bit.
    """
    run = tmp_path / "run"
    own = ("--inference", f"@{CONFIGS}/infer.toml", "--inference.port", two_free_ports())
    own += ("--inference.servers", 2)
    arguments = _without_url(rl, tmp_path / "orch.toml")
    with shell.start(*arguments, *own, "--output-dir", run) as command:
        command.wait_until(lambda: len(rows(run)) >= 1)
        assert {address for address, _ in command.listening()} <= LOOPBACK
        command.wait_until(lambda: len(rows(run)) >= 6)
        command.wait_until(lambda: rows(run)[-1]["servers/healthy"] == 2)
        before = read(run / "roles.json")["roles"]
        pid = before["inference_1"]["pid"]
        for process in psutil.Process(pid).children(recursive=True):
            if "vllm.entrypoints" in cmdline(process.pid):
                process.kill()
        wait_for_successor(command, run, "inference_1", pid)
        finished = command.finish()
    assert finished.code == 0, finished.output
    assert "inference_1 died (exit code 1) and is started again" in finished.output
    assert_same_run(run, calm)
    after = read(run / "roles.json")["roles"]
    assert {role for role in before if before[role]["pid"] != after[role]["pid"]} == {"inference_1"}
    logs = {path.name for path in (run / "logs").iterdir()}
    assert {"inference.log", "inference_1.log", "vllm.log", "vllm_1.log"} <= logs


def test_roles_that_take_turns_survive_each_other(
    shell: Shell, rl: tuple[object, ...], calm: Path, tmp_path: Path
):
    """Each role is killed while a step is trained, and again when the server is to wake up.

    With `--colocate` the same comes out as with a server that never sleeps, to the bit.
    """
    run, faults = tmp_path / "run", tmp_path / "faults"
    own = ("--inference", f"@{CONFIGS}/infer.toml", "--inference.port", free_port(), "--colocate")
    arguments = _without_url(rl, tmp_path / "orch.toml")
    versions = RunDirectory(run).versions
    faults.mkdir()
    strikes = ("orchestrator.before_push:kill@3", "publish.announced:kill@2")
    for fault in strikes:
        (faults / fault).touch()
    storm = {"CAIRN_FAULT": ",".join(strikes), "CAIRN_FAULT_ONCE": str(faults)}
    with shell.start(*arguments, *own, "--output-dir", run, environment=storm) as command:

        def trainers_turn(first: int) -> int | None:
            """The step that the trainer has its turn for, if that is `first` or a later one."""
            attempt = RunDirectory(run).attempt()
            turn = attempt and versions.trainers_turn(attempt)
            return turn.until if turn and turn.until and turn.until >= first else None

        def kill_server() -> None:
            command.family()
            for pid in (pid for pid, _ in command.survivors() if "vllm.entrypoints" in cmdline(pid)):
                os.kill(pid, signal.SIGKILL)

        command.wait_until(lambda: not any(faults.iterdir()))
        at = len(rows(run)) + 1
        at = command.wait_until(lambda: trainers_turn(at + 1))
        pid = send(run, "trainer", signal.SIGKILL)
        wait_for_successor(command, run, "trainer", pid)
        at = command.wait_until(lambda: trainers_turn(at + 1))
        pid = send(run, "orchestrator", signal.SIGKILL)
        wait_for_successor(command, run, "orchestrator", pid)
        at = command.wait_until(lambda: trainers_turn(at + 1))
        pid = read(run / "roles.json")["roles"]["inference"]["pid"]
        kill_server()
        wait_for_successor(command, run, "inference", pid)
        at = command.wait_until(lambda: trainers_turn(at + 1))
        pid = read(run / "roles.json")["roles"]["inference"]["pid"]
        command.wait_until(lambda: trainers_turn(at) != at)
        kill_server()
        wait_for_successor(command, run, "inference", pid)
        finished = command.finish()
    assert finished.code == 0, finished.output
    assert_same_run(run, calm)
    assert '"ok": true' in shell.succeed("ckpt", "audit", run, "--json")
    told = re.findall(
        r"is (asleep) with weights \S+:(\d+)|is (awake)|version \S+:(\d+) is (served)",
        (run / "logs" / "orchestrator.log").read_text(),
    )
    order = ["awake", "10 served", "asleep 10", "awake", "11 served", "asleep 11"]
    assert [" ".join(filter(None, groups)) for groups in told[-6:]] == order


def two_free_ports() -> int:
    """The first of two ports in sequence on which nothing listens."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            return port


def _without_url(arguments: tuple[object, ...], copy: Path) -> list[object]:
    """A command line whose run starts a server of its own."""
    lines = (Path(CONFIGS) / "orch.toml").read_text().splitlines(keepends=True)
    copy.write_text("".join(line for line in lines if not line.startswith("inference_url")))
    return [f"@{copy}" if argument == f"@{CONFIGS}/orch.toml" else argument for argument in arguments]


@pytest.mark.smoke
def test_fine_tuning_survives_its_trainer_and_a_worker(shell: Shell, trained: Path, tmp_path: Path):
    """The driver is killed, then a worker; what they did since then is done again, to the bit.

    The worker's place is taken by a spare under the same driver. Steps in memory survive both, so that each
    time at most one step is taken again.
    """
    run = tmp_path / "run"
    arguments = ("--ckpt.interval", 40, "--ckpt.memory-interval", 1, "--max-steps", 120)
    arguments += ("--spare-workers", 1, "--output-dir", run)
    patience = ("--heartbeat-timeout", 600)  # a spare gets ready only while nobody else wants the processors
    with shell.start("sft", "@", f"{CONFIGS}/sft.toml", *arguments, *patience) as command:
        command.wait_until(lambda: len(rows(run)) >= 23)
        worker = read(run / "roles.json")["roles"]["trainer_rank0"]["pid"]
        pid = send(run, "trainer", signal.SIGKILL)
        wait_for_successor(command, run, "trainer", pid)
        wait_for_successor(command, run, "trainer_rank0", worker)
        command.wait_until(lambda: len(rows(run)) >= 26)
        send(run, "trainer_rank0", signal.SIGSTOP)  # or it is done before the spare is ready
        wait_for_spare(command, run)
        before = read(run / "roles.json")["roles"]
        spare = next(entry["pid"] for entry in before.values() if entry["state"] == "waiting")
        send(run, "trainer_rank0", signal.SIGKILL)
        wait_for_successor(command, run, "trainer_rank0", before["trainer_rank0"]["pid"])
        after = read(run / "roles.json")["roles"]
        finished = command.finish()
    assert finished.code == 0, finished.output
    assert "trainer died (exit code -9) and is started again" in finished.output
    assert "trainer_rank0 died and is replaced by a spare" in finished.output
    assert (after["trainer"]["pid"], after["trainer_rank0"]["pid"]) == (before["trainer"]["pid"], spare)
    assert untimed(whole_rows(run, 120)) == untimed(rows(trained)[:120])
    assert rows(run)[-1]["run/recomputed_steps"] <= 2
    assert not (run / "memory").exists()
    assert '"ok": true' in shell.succeed("ckpt", "audit", run, "--json")


@pytest.mark.parametrize("axis", draws.cases(["context", "tensor", "expert"], __name__, 1))
def test_the_other_ranks_survive_a_rank_that_dies_and_one_that_stops(
    shell: Shell, trained: Path, tmp_path: Path, axis: str
):
    """Rank 1 is killed, then rank 0 stopped, while every step is saved; the other one stays each time.

    The two share the tokens of each row, the matrices or the experts, so that each waits for the other in
    every layer. When rank 1 is killed, rank 0 waits for its part of a save.
    """
    run, sft, undisturbed = tmp_path / "run", ("sft", "@", f"{CONFIGS}/sft.toml"), trained
    if axis == "expert":
        undisturbed = tmp_path / "undisturbed"
        sft = (*sft, "--model.name", make("qwen3_moe", tmp_path / "model"))
        shell.succeed(*sft, "--max-steps", 40, "--output-dir", undisturbed)
    arguments = ("--workers", 2, f"--parallel.{axis}", 2, "--ckpt.interval", 1, "--max-steps", 40)
    arguments += (*HANG, "--output-dir", run)
    with shell.start(*sft, *arguments) as command:
        command.wait_until(lambda: len(rows(run)) >= 10)
        first = read(run / "roles.json")["roles"]
        (writer,) = children(first["trainer_rank1"]["pid"], "cairn.checkpoint.saving.writer")
        os.kill(writer, signal.SIGSTOP)
        count = -1
        while len(rows(run)) != count:  # both wait for the save before the next one
            count = len(rows(run))
            time.sleep(1)
        send(run, "trainer_rank1", signal.SIGKILL)
        wait_for_successor(command, run, "trainer_rank1", first["trainer_rank1"]["pid"])
        command.wait_until(lambda: len(rows(run)) >= 20)
        second = read(run / "roles.json")["roles"]
        send(run, "trainer_rank0", signal.SIGSTOP)
        wait_for_successor(command, run, "trainer_rank0", second["trainer_rank0"]["pid"])
        third = read(run / "roles.json")["roles"]
        finished = command.finish()
    assert finished.code == 0, finished.output
    assert first["trainer_rank0"]["pid"] == second["trainer_rank0"]["pid"]
    assert second["trainer_rank1"]["pid"] == third["trainer_rank1"]["pid"]
    assert first["trainer"]["pid"] == third["trainer"]["pid"]
    assert "trainer_rank1 died and is started again" in finished.output
    assert f"trainer_rank0 hung (no sign of life for {SILENCE} s" in finished.output
    assert steps(run) == list(range(1, 41))
    losses = [row["loss"] for row in whole_rows(run, 40)]
    assert losses == pytest.approx([row["loss"] for row in rows(undisturbed)[:40]], rel=1e-4)


def cmdline(pid: int) -> str:
    """What a process calls itself."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
