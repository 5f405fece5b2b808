"""`runs`, `watch` and `diagnose`: what they say of runs in any state, at any width."""

import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from fcntl import ioctl
from html.parser import HTMLParser
from pathlib import Path
from termios import TIOCSWINSZ
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import cairn
from cairn.config.rl_trainer import TrainerConfig
from cairn.launch import main
from cairn.orchestrator.ledger import LedgerTokens
from cairn.run.directory import RunDirectory
from cairn.run.files import write_json
from cairn.run.history import Costs, resumed, starting
from cairn.run.locked_folder import lock
from cairn.run.messages import Attempt
from cairn.run.output import duration
from cairn.run.view import RunView
from cairn.trainer.tracking import RunTracker
from cairn.watch.commands import find_runs
from cairn.watch.goodput import (
    sentence,
    time_account,
    token_account,
    token_rows,
    token_sentence,
)
from cairn.watch.overview import Curve, overview
from cairn.watch.terminal import BLOCKS, spark

HEALTHY = {"grad_norm": 0.3, "learned_tokens": 400, "reward/mean": 0.4, "time/step": 2.0, "time/wait": 0.5}
FLAT = HEALTHY | {"groups": 8, "groups/unlearned": 8, "groups/all_worst": 8, "groups/all_best": 0}


def make(path: Path, command: str = "rl", state: str = "done", steps: int = 4, **row: Any) -> RunDirectory:
    """A run that has ended, as its files say it."""
    run = RunDirectory(path)
    run.heartbeats.mkdir(parents=True)
    write_json(run.config, {"max_steps": 10, "ckpt": None})
    run.begin(Attempt("5eed", 1, command, 0, None, "branch_1"))
    run.history.begin_attempt(1, None, [command, "@", "my run.toml", "--ckpt"])
    run.set_role("trainer", state)
    for step in range(1, steps + 1):
        run.metrics.append({"step": step, **HEALTHY, **row})
    return run


@pytest.fixture
def said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process; returns its exit code and what it printed to both streams."""

    def run(command: str, *arguments: object, width: int = 200) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [command, *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", str(width))
        try:
            code = getattr(main, command)()
        except SystemExit as error:
            code = int(error.code or 0)
        out, err = capfd.readouterr()
        return code, out, err

    return run


def test_all_runs_below_a_folder_with_what_goes_on_with_each(tmp_path: Path, said: Callable):
    make(tmp_path / "a" / "fine", "sft", steps=10, loss=2.5)
    make(tmp_path / "deep" / "er" / "dead", state="running", **FLAT)
    (tmp_path / "a" / "fine" / "inner").mkdir()
    make(tmp_path / "a" / "fine" / "inner" / "hidden")
    (tmp_path / "no_run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    code, out, _ = said("runs", tmp_path, width=500)
    lines = out.splitlines()
    assert code == 0
    assert sum(str(tmp_path) in line for line in lines) == 2
    (fine,) = [line for line in lines if "a/fine" in line]
    assert re.search(r"sft +done +10/10 +loss 2.5", fine)
    (dead,) = [line for line in lines if "er/dead" in line]
    assert re.search(r"rl +killed +4/10 +reward 0.4 .*no spread", dead)
    assert lines[-1] == "  rl @ 'my run.toml' --ckpt --ckpt.resume auto"
    _, out, _ = said("runs", tmp_path, "--json")
    shown = {Path(run["path"]).name: run for run in json.loads(out)}
    assert shown["dead"]["step"] == 4
    assert shown["dead"]["curves"][0]["newest"] == 0.4
    assert shown["fine"]["resume"] is None
    assert said("runs", tmp_path / "no_run")[1].startswith("there is no run in ")
    code, _, err = said("runs", tmp_path / "nowhere")
    assert (code, "nowhere: there is no such folder" in err) == (2, True)


def test_a_damaged_run_is_listed_beside_the_others(tmp_path: Path, said: Callable):
    make(tmp_path / "fine")
    damaged = make(tmp_path / "damaged")
    damaged.metrics.path.unlink()
    damaged.metrics.path.mkdir()
    code, out, _ = said("runs", tmp_path, width=500)
    assert code == 0
    assert re.search(r"/damaged +damaged .*can't be read", out)
    assert re.search(r"fine +rl +done", out)


def test_diagnosis_says_why_a_run_does_not_learn(tmp_path: Path, said: Callable):
    run = make(tmp_path / "flat", **FLAT)
    code, out, _ = said("diagnose", run.path)
    assert code == 1
    assert "flat: rl, done, step 4 of 10" in out
    assert "1. 32 of 32 prompts taught nothing in steps 1 to 4 (all answers alike: 32 all wrong)" in out
    assert "the trainer computes 80% of it, waits 20%" in out
    _, out, _ = said("diagnose", run.path, "--json")
    shown = json.loads(out)
    assert [finding["rule"] for finding in shown["findings"]] == ["no spread"]
    assert sum(shown["time"]["seconds"].values()) > 0
    code, out, _ = said("diagnose", make(tmp_path / "fine").path)
    assert (code, "nothing is wrong" in out) == (0, True)


def test_a_fault_of_the_newest_steps_is_found_in_a_long_run(tmp_path: Path):
    run = make(tmp_path / "long", steps=200, **{"groups": 8, "groups/unlearned": 1})
    for step in range(201, 211):
        run.metrics.append({"step": step, **FLAT})
    (finding,) = overview(RunView(run.path)).findings
    assert "64 of 64 prompts taught nothing in steps 203 to 210" in finding.what


@pytest.mark.parametrize("command", ["watch", "diagnose"])
def test_a_folder_that_is_no_run_is_refused_with_those_below_it(tmp_path: Path, said: Callable, command: str):
    make(tmp_path / "one")
    code, _, err = said(command, tmp_path)
    assert code == 2
    assert f"`runs {tmp_path}` lists the 1 below it" in err
    code, _, err = said(command, tmp_path / "nowhere")
    assert (code, "there is no such folder" in err) == (2, True)


@pytest.mark.parametrize("width", [80, 200])
def test_a_run_that_is_over_is_shown_once_and_nothing_is_cut(tmp_path: Path, said: Callable, width: int):
    run = make(tmp_path / ("long_name_" * 9), state="failed", **FLAT)
    code, out, _ = said("watch", run.path, width=width)
    assert code == 0
    assert max(map(len, out.splitlines())) <= width
    together = "".join(out.split())
    assert "long_name_" * 9 in together
    assert "32of32promptstaughtnothing" in together
    assert "goonwith:rl@'myrun.toml'--ckpt--ckpt.resumeauto" in together


def test_control_characters_of_a_run_do_not_steer_the_terminal(tmp_path: Path, said: Callable):
    run = make(tmp_path / "run", **{"eval/\x1b[2J[red]x/reward": 0.5})
    _, out, _ = said("watch", run.path)
    assert "\x1b" not in out
    assert "[red]x 0.5" in " ".join(out.split())


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 200])
def test_a_terminal_follows_a_run_until_it_ends(tmp_path: Path, width: int):
    """In a real pseudo-terminal: what changes is drawn again in its place, and the end is seen."""
    run = make(tmp_path / "run", state="running", steps=1)
    lock(run)
    here, there = pty.openpty()
    ioctl(there, TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    code = "import sys; from cairn.launch.main import watch; sys.exit(watch())"
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run.path)], stdin=there, stdout=there, stderr=there, env=environment
    ) as process:
        os.close(there)
        try:
            seen = read_until(here, "step 1 of 10")
            for step in (2, 3):
                run.metrics.append({"step": step, **HEALTHY, "reward/mean": step / 4})
            seen = read_until(here, "step 3 of 10")
            assert "running" in seen
            assert re.search(r"reward +0.75", seen)
            run.set_role("trainer", "done")
            run.unlock()
            read_until(here, "done")
            assert process.wait(60) == 0
        finally:
            process.kill()  # or it waits for ever for somebody to read what it prints
    os.close(here)


def read_until(terminal: int, text: str, seconds: float = 120) -> str:
    """What a terminal shows until `text` is there, without the sequences that move the cursor."""
    content = b""
    readable = select.poll()
    readable.register(terminal, select.POLLIN)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if readable.poll(1000):
            content += os.read(terminal, 65536)
            plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", content.decode(errors="replace"))
            if text in plain:
                return plain
    raise AssertionError(f"{text!r} is not in {content!r}")


def test_looking_changes_nothing(tmp_path: Path, said: Callable):
    run = make(tmp_path / "run", **FLAT)
    before = {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))}
    for command in ("runs", "watch", "diagnose"):
        said(command, tmp_path if command == "runs" else run.path)
    assert {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))} == before


def test_a_search_ends_where_folders_can_not_be_read_and_at_its_depth(tmp_path: Path):
    make(tmp_path / "a/b/c/d")
    make(tmp_path / "a/b/c/e/f")
    assert find_runs(tmp_path) == [tmp_path / "a/b/c/d"]
    assert find_runs(tmp_path / "a/b/c/d") == [tmp_path / "a/b/c/d"]
    assert find_runs(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["sft", "@", "a.toml"], "sft @ a.toml --ckpt.resume auto"),
        (["sft", "--ckpt.resume-step", "20", "--seed", "3"], "sft --seed 3 --ckpt.resume auto"),
        (["rl", "--ckpt.resume=latest", "--model.name", "a b"], "rl --model.name 'a b' --ckpt.resume auto"),
    ],
)
def test_the_command_that_goes_on(argv: list[str], command: str):
    assert resumed(argv, os.getcwd()) == command
    assert resumed(argv, "/else where") == f"cd '/else where' && {command}"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h 0 min"), (48 * 3600, "2 d 0 h"), (-5, "0 s")],
)
def test_lengths_of_time(seconds: float, text: str):
    assert duration(seconds) == text


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=200), st.integers(1, 60))
@example([1.7e308, 1.7e308, -1.7e308, 0.0], 2)
def test_a_curve_of_any_values_fits(values: list[float], width: int):
    text = spark(Curve("a", "a", list(enumerate(values))), width)
    assert len(text) <= width
    assert set(text) <= set(BLOCKS)


def test_use_of_gpus_where_there_are_any(tmp_path: Path, said: Callable):
    """Of rows of GPUs, in the view as in Python; nothing on CPUs."""
    gpu, cpu = make(tmp_path / "gpu", mfu=0.412, attention="varlen (window of 9)"), make(tmp_path / "cpu")
    assert "  MFU 41.2%, attention varlen (window of 9)" in said("watch", gpu.path)[1]
    assert "MFU" not in said("watch", cpu.path)[1]
    assert cairn.Run(gpu.path).overview().mfu == pytest.approx(0.412)
    assert overview(RunView(cpu.path)).mfu is None


def test_a_rising_curve_rises():
    text = spark(Curve("a", "a", [(step, float(step)) for step in range(100)]), 8)
    assert text == BLOCKS
    still = spark(Curve("a", "a", [(step, 2 + step % 7 * 1e-6) for step in range(100)]), 8)
    assert len(set(still)) == 1, "what varies in its last digits alone is flat"
    assert spark(Curve("a", "a", [(1, 2.0), (2, 3.0)]), 8, plain=True) == "2 -> 3"


# What became of the time.


def history(*attempts: tuple[float, float]) -> list[dict]:
    """Attempts by the time at which each began, and how long nobody was at work before it."""
    return [
        {"event": "attempt", "number": number, "time": time, "idle": idle}
        for number, (time, idle) in enumerate(attempts, start=1)
    ]


def timed(*rows: tuple[float, float, float], **more: Any) -> list[dict]:
    """Rows by step, wait and the wall time at their end."""
    return [
        {"step": step, "time/step": computed, "time/wait": wait, "run/wall_seconds": wall, **more}
        for step, (computed, wait, wall) in enumerate(rows, start=1)
    ]


def test_every_second_of_a_run_is_accounted_for():
    """Started for 20 s, two steps, a stop of 100 s, 8 s to come back, a step with a save, 5 s since then."""
    rows = timed((2, 1, 23), (2, 1, 26), (2, 1, 37), (2, 1, 41))
    rows[3]["time/save_stall"] = 0.5
    account = time_account(rows, history((1000, 0), (1126, 100)), Costs({}, 0, 0, 12, 46))
    assert account.seconds == {
        "computed": 8,
        "waited": 4,
        "saved": 0.5,
        "started": 28,
        "lost": 0,
        "other": 5.5,
    }
    assert (account.wall, account.idle, account.ettr) == (46, 100, pytest.approx(12 / 46))
    assert account.price(3600.0)["started"] == 28
    assert sentence(account).startswith("17% of the run's time was computed; 61% started, 12% other")


def test_restarts_and_what_is_done_again_are_lost_time():
    rows = timed((2, 1, 23), (2, 30, 55), (2, 1, 70))
    rows[1] |= {"run/restarts": 1}
    rows[2] |= {"run/restarts": 1, "run/recomputed_steps": 2}
    account = time_account(rows, history((1000, 0), (1060, 0)), Costs({"trainer": 1}, 2, 800, 8, 70))
    assert account.seconds["lost"] == 30 + 12
    assert account.wall == 70


def test_the_wait_for_a_starting_server_is_start_and_no_use(tmp_path: Path):
    """Of 30 s for the first batch of an attempt, requests and rewards explain 6 s."""
    row = {"time/wait": 30.0, "time/step": 2.0, "time/generate": 5.0, "time/rewards": 1.0}
    assert starting(row) == 24
    assert starting(row | {"time/generate": 29.5}) == 0
    assert starting({"time/wait": 30.0}) == 0, "nothing is sampled"
    rows = timed((2, 30, 34), (2, 1, 37))
    rows[0] |= {"time/start": 24.0}
    account = time_account(rows, history((1000, 0)), Costs({}, 0, 0, 11, 37))
    assert account.seconds == dict(computed=4, waited=7, saved=0, started=26, lost=0, other=0)
    run = RunDirectory(tmp_path)
    run.history.begin_attempt(1, None)
    tracker = RunTracker(TrainerConfig(wandb=None), run, Attempt("5eed", 1, "rl", 0, None, "branch_1"))
    for step in (1, 2):
        tracker.log({"step": step, **row})
    assert [row.get("time/start") for row in run.metrics.rows()] == [24.0, None]
    assert [row["run/useful_seconds"] for row in run.metrics.rows()] == [8.0, 40.0]


# What became of the tokens.


def test_every_token_of_a_run_is_accounted_for():
    row = {"rollout/tokens": 100, "learned_tokens": 70, "lost_tokens": 5, "tokens/unlearned": 20}
    thrown_away = {"tokens/failed": 7, "tokens/redrawn": 8, "tokens/dropped": 9}
    rows = [{"step": 1, **row, **thrown_away, "tokens/waiting": 90}, {"step": 2, **row, "tokens/waiting": 40}]
    account = token_account(rows, Costs({}, 3, 300, 1, 1), [{"tokens": 2.5, "samples": 4}, {"loss": 1.0}])
    assert account.tokens == {
        **dict(trained=150, unlearned=50, failed=7, redrawn=8, dropped=9),
        **dict(waiting=40, evaluated=10, repeated=300),
    }
    assert account.total == 574
    beyond = LedgerTokens(waiting=60, thrown={"dropped": 5})
    grown = token_account(rows, Costs({}, 3, 300, 1, 1), [], beyond).tokens
    assert (grown["waiting"], grown["dropped"], grown["failed"]) == (60, 14, 7)
    assert sum(account.price(57.4).values()) == pytest.approx(57.4)
    assert account.price(57.4)["trained"] == pytest.approx(15)
    assert token_sentence(account, 57.4) == (
        "26% of 574 tokens were trained on; 52% repeated, 9% unlearned, 7% waiting, "
        "382,666.67 a million trained tokens"
    )
    assert token_rows(account)[0][:3] == ["trained", "150", "26%"]


def test_tokens_of_records_are_those_to_learn_from():
    """In SFT, and in runs of earlier versions, which do not say more."""
    account = token_account([{"step": 1, "learned_tokens": 90, "lost_tokens": 10}], Costs({}, 0, 0, 1, 1))
    assert {fate: count for fate, count in account.tokens.items() if count} == dict(trained=90, unlearned=10)
    nothing = token_account([{"step": 1, "learned_tokens": float("nan")}], Costs({}, 0, 0, 1, 1))
    assert (token_sentence(nothing, 5.0), token_rows(nothing)) == ("no token yet", [])


NUMBERS = st.floats(0, 1e6) | st.none()


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS), max_size=8), st.floats(0, 1e6))
def test_the_kinds_of_time_add_up_to_the_wall_time(rows: list[tuple], wall: float):
    """Or to more, where the rows alone have taken longer than that, because a clock was set back."""
    names = ("time/step", "time/wait", "run/wall_seconds", "time/save_stall")
    seen = [{"step": n, **dict(zip(names, row, strict=True))} for n, row in enumerate(rows, start=1)]
    account = time_account(seen, history((0, 0), (50, 10)), Costs({}, 0, 0, 0, wall))
    assert all(seconds >= 0 for seconds in account.seconds.values())
    assert account.wall >= wall * (1 - 1e-9)
    assert 0 <= account.ettr <= 1
    assert sentence(account)


def test_the_account_is_in_money_if_an_hour_has_a_price(tmp_path: Path, said: Callable):
    run = make(tmp_path / "run", **{"run/wall_seconds": 3600.0})
    _, out, _ = said("diagnose", run.path, "--price", "2.5")
    assert re.search(r"computed +8 s +\d+% +0.01 +steps that count", out)
    assert re.search(r"trained +1,600 +100% +2.51 +learned from", out)
    code, _, err = said("diagnose", run.path, "--price", "cheap")
    assert (code, "--price" in err and "a number" in err) == (2, True)


def test_a_report_is_one_file_that_loads_nothing_and_runs_nothing(tmp_path: Path, said: Callable):
    """Whatever stands in the run: text is escaped, and there is neither a script nor an address."""
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    run = make(tmp_path / "run", **FLAT, **{f"eval/{evil}/reward": 0.5})
    write_json(run.config, {"max_steps": 10, "name": evil})
    run.evals.append({"step": 2, "name": evil, "reward": 0.25})
    path = tmp_path / "out.html"
    code, out, _ = said("report", run.path, "--out", path, "--png", tmp_path / "png")
    assert code == 0
    assert out.splitlines()[0] == str(path)
    page = path.read_text()
    assert "32 of 32 prompts taught nothing" in page
    assert "<svg" in page
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert not re.search(r"@import|url\(", page)
    tags = list[tuple[str, str]]()

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.extend((tag, name) for name, _ in [*attrs, ("", None)])

    Tags().feed(page)
    assert {"svg", "table", "details"} <= {tag for tag, _ in tags}
    assert not {tag for tag, _ in tags} & {"script", "img", "link", "iframe", "a"}
    assert not [name for _, name in tags if name in ("src", "href") or name.startswith("on")]
    assert [file.name for file in sorted((tmp_path / "png").iterdir())][-1] == "reward_mean.png"
    assert (tmp_path / "png" / "reward_mean.png").read_bytes().startswith(b"\x89PNG")


def test_python_gets_the_numbers_that_are_shown(tmp_path: Path, said: Callable):
    """To the digit: the API, the lists of commands and the account are one value."""
    run = make(tmp_path / "run", **FLAT, **{"run/wall_seconds": 30.0})
    shown, account = cairn.Run(run.path).overview(), cairn.Run(run.path).time_account()
    (listed,) = json.loads(said("runs", tmp_path, "--json")[1])
    diagnosed = json.loads(said("diagnose", run.path, "--json")[1])
    assert (
        [curve["newest"] for curve in listed["curves"]] == [curve.newest for curve in shown.curves] == [0.4]
    )
    assert (listed["pace"], listed["step"]) == (shown.pace, shown.step)
    assert [one["rule"] for one in diagnosed["findings"]] == [one.rule for one in shown.findings]
    assert diagnosed["time"]["seconds"]["computed"] == account.seconds["computed"] == 8.0
    assert diagnosed["tokens"]["tokens"] == cairn.Run(run.path).token_account().tokens
