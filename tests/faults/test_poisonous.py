"""An RL run some of whose problems crash, hang, end or confuse the process that rewards their answers."""

import json
import re
from pathlib import Path

import pytest
from poisonous import POISON, SURROGATE_MESSAGE
from runs import CONFIGS, Server, Shell, rows

from cairn.orchestrator.rollout_log import KeptRollouts
from cairn.run.directory import RunDirectory

pytestmark = pytest.mark.timeout(600)  # for the fixture that waits for the run

STEPS = 4
REASONS = {
    "crashes": r"the process was killed by SIGSEGV while it ran, .*the answer was ",
    "holds_the_gil": r"the process hung while it ran, ",
    "raises_half_a_pair": r"raised ValueError: caf\ufffd; the answer was ",
    "leaves": r"raised SystemExit: 0",
    "leaves_at_once": r"the process ended with exit code 0 while it ran, ",
}


def arguments(folder: Path, server: Server) -> list[object]:
    return [
        *("rl", "--trainer", f"@{CONFIGS}/train.toml", "--orchestrator", f"@{CONFIGS}/orch.toml"),
        *("--orchestrator.inference-url", server.url, "--heartbeat-timeout", 8),
        *("--orchestrator.prompts-per-step", 3, "--orchestrator.samples-per-prompt", 2),
        *("--trainer.micro-batch-size", 2, "--orchestrator.reward-retries", 1),
        *("--orchestrator.reward-retry-seconds", 0, "--ckpt", "--ckpt.interval", 1),
        *("--orchestrator.max-failed-share", 1),
        *("--orchestrator.environment.name", "poisonous:Poisonous"),
        *("--orchestrator.environment.args", json.dumps({"log": str(folder / "calls")})),
        *("--output-dir", folder / "run"),
    ]


@pytest.fixture(scope="module")
def finished(shell: Shell, server: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run, and what the command said."""
    folder = tmp_path_factory.mktemp("poisonous")
    with shell.start(*arguments(folder, server), "--max-steps", STEPS) as command:
        done = command.finish(500)
    assert done.code == 0, done.output
    return folder / "run", done.output


def test_the_run_goes_on_and_tells_why_answers_have_failed(finished: tuple[Path, str]):
    run, _ = finished
    assert [row["step"] for row in rows(run)] == list(range(1, STEPS + 1))
    kept = KeptRollouts(RunDirectory(run).rollouts)
    failed = {}
    for step in kept.steps():
        for row in kept.read(step):
            if row["failed"] is not None:
                failed.setdefault(row["problem"], set()).add(row["failed"])
    seen = 0
    for problem, poison in enumerate(POISON):
        wanted = REASONS.get(poison.__name__)
        for reason in failed.get(problem, ()):
            assert wanted is None or re.search(wanted, reason), (poison, reason)
            seen += wanted is not None
    assert seen >= 3, failed
    for reason in failed.get(SURROGATE_MESSAGE, ()):
        assert "has the character U+D83D, half of a surrogate pair" in reason


def test_no_restart_is_without_its_reason_and_none_was_for_a_child(finished: tuple[Path, str]):
    run, output = finished
    events = RunDirectory(run).history.rows()
    restarts = [event for event in events if event["event"] == "restart"]
    assert restarts
    for event in restarts:
        assert event["role"] == "orchestrator", event
        assert "while it ran environment 'poisonous:Poisonous': reward of problem" in event["reason"], event
    assert "SIGTERM" not in output
    log = (run / "logs" / "orchestrator.log").read_text(errors="replace")
    assert "Fatal Python error: Segmentation fault" in log
    assert "poisonous.py" in log, "a crash's stack names the user's code"
    assert log.count("SystemExit: 0\n") <= 2 * (1 + log.count("Fatal Python error")) + 20


def test_it_can_be_audited_and_resumed(finished: tuple[Path, str], shell: Shell, server: Server):
    run, _ = finished
    shell.succeed("ckpt", "audit", run)
    shell.succeed(*arguments(run.parent, server), "--max-steps", STEPS + 1, "--ckpt.resume", "auto")
    assert len(rows(run)) == STEPS + 1
    shell.succeed("ckpt", "audit", run)
