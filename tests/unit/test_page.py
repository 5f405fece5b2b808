"""The page's server and what it answers: to whom, equal to the Python API, and with files in any state."""

import json
import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_runs import HOSTILE, busy, damage, flat, hostile, keep, make, many, rollout
from starlette.testclient import TestClient

import cairn
from cairn.checkpoint.retention import WAITING
from cairn.launch import main
from cairn.orchestrator.advantages import Grpo
from cairn.orchestrator.rollout_log import KeptRollouts
from cairn.run.files import write_json
from cairn.run.spans import MAIN, TimeSpan
from cairn.run.view import RunView
from cairn.watch.overview import overview
from cairn.watch.page import accounts, answers, curves, events
from cairn.watch.page.api import RunApi, UnknownRun
from cairn.watch.page.rollout_index import SORTS, RolloutIndex, RolloutQuery, histogram
from cairn.watch.page.server import make_app, plain

TOKEN = "se-cret_"
QUESTIONS = {
    "runs": "",
    "pulse": "run=run",
    "overview": "run=run",
    "keys": "run=run",
    "points": "run=run&keys=loss,reward/mean&axis=time",
    "row": "run=run&step=1",
    "evaluations": "run=run",
    "rollouts": "run=run&text=a",
    "prompts": "run=run&step=1",
    "group": "run=run&step=1&place=0",
    "conversation": "run=run&step=1&place=0&sample=0",
    "tokens": "run=run&step=1&place=0&sample=0",
    "discarded": "run=run",
    "account": "run=run",
    "checkpoints": "run=run",
    "timeline": "run=run",
    "logs": "run=run",
    "log": "run=run&name=trainer.log",
}
"""Every question that the page asks, of a run named `run`."""

Ask = Callable[..., Any]


def client(folder: Path) -> TestClient:
    return TestClient(
        make_app(RunApi(folder), TOKEN), base_url="http://127.0.0.1:8265", follow_redirects=False
    )


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Ask]:
    """Asks the page of the runs in the test's folder; returns the answer, which must be a good one."""
    with client(tmp_path) as page:

        def asked(name: str, query: str = "", status: int = 200) -> Any:
            answer = page.get(f"/{TOKEN}/api/{name}?{query}")
            assert answer.status_code == status, answer.text
            return answer.json()

        yield asked


# Who is answered


@pytest.mark.parametrize(
    "path", ["/", "/api/runs", "/main.js", "/wrong/", f"/{TOKEN}x/", f"/x/{TOKEN}/", "//", ""]
)
def test_without_the_token_nothing_is_answered(tmp_path: Path, path: str):
    make(tmp_path / "run")
    answer = client(tmp_path).get(path)
    assert answer.status_code == 401
    assert "run" not in answer.text.replace("dash", "").split("401")[0]
    assert str(tmp_path) not in answer.text
    for name, query in QUESTIONS.items():
        assert client(tmp_path).get(f"/api/{name}?{query}").status_code == 401


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW"])
def test_only_get_is_answered(tmp_path: Path, method: str):
    for path in (f"/{TOKEN}/", f"/{TOKEN}/api/runs", "/"):
        answer = client(tmp_path).request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET")


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil:8265", "10.0.0.1:8265", "", "[::2]:1", "0:1"],
)
def test_another_name_in_the_host_header_is_refused(tmp_path: Path, host: str):
    """So a page elsewhere whose name is made to mean this machine (DNS rebinding) gets nothing."""
    answer = client(tmp_path).get(f"/{TOKEN}/api/runs", headers={"host": host})
    assert answer.status_code == 403
    for good in ("127.0.0.1:9", "localhost:12345", "LOCALHOST", "[::1]:80"):  # as through ssh -L
        assert client(tmp_path).get(f"/{TOKEN}/", headers={"host": good}).status_code == 200


def test_every_answer_forbids_what_the_page_does_not_need(tmp_path: Path):
    make(tmp_path / "run")
    for path in (
        f"/{TOKEN}/",
        f"/{TOKEN}/main.js",
        f"/{TOKEN}/api/runs",
        f"/{TOKEN}/api/row?run=x",
        f"/{TOKEN}/no",
        "/",
    ):
        headers = client(tmp_path).get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
        assert "unsafe" not in policy
        assert "require-trusted-types-for 'script'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert "set-cookie" not in headers
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "name",
    [
        "../server.py",
        "..%2fserver.py",
        "%2e%2e/command.py",
        "static/main.js",
        "/etc/passwd",
        "nothing.js",
        ".",
    ],
)
def test_no_other_file_is_served(tmp_path: Path, name: str):
    answer = client(tmp_path).get(f"/{TOKEN}/{name}")
    assert answer.status_code in (401, 404)


def test_a_run_is_one_that_was_found_and_no_path(tmp_path: Path, ask: Ask):
    make(tmp_path / "run")
    make(tmp_path.parent / f"{tmp_path.name}-beside")
    for run in ("", ".", "..", f"../{tmp_path.name}-beside", "/etc", str(tmp_path / "run"), "run/", "run\0"):
        assert "no such run" in ask("overview", f"run={quote(run, safe='')}", status=404)["error"]
    assert "run is missing" in ask("overview", "", status=400)["error"]


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("step=x", "step = 'x' is no whole number"),
        ("", "step is missing"),
        ("step=99999999999999999999", "is too large"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused_with_its_field(
    tmp_path: Path, ask: Ask, query: str, says: str
):
    make(tmp_path / "run")
    assert says in ask("row", f"run=run&{query}", status=400)["error"]
    assert "sort = 'up': there are newest" in ask("rollouts", "run=run&sort=up", status=400)["error"]
    assert "there is no such log" in ask("log", "run=run&name=..%2Fconfig.json", status=400)["error"]
    assert "axis = 'z'" in ask("points", "run=run&keys=loss&axis=z", status=400)["error"]


def test_the_page_itself_names_nothing_outside_and_parses_no_markup():
    folder = resources.files("cairn.watch.page") / "static"
    for entry in folder.iterdir():
        text = entry.read_text()
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text), entry.name
        assert not re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
        )
        assert (
            not re.findall(r"<script(?![^>]*\bsrc=)|<style|\bon\w+=\"|style=\"", text)
            or entry.name != "index.html"
        )
        if entry.name.endswith(".js"):
            for name in re.findall(r'^import .* from "(.+)";$', text, re.MULTILINE):
                assert (folder / name.removeprefix("./")).is_file(), (entry.name, name)


def test_nothing_heavy_is_imported():
    code = "import sys, cairn.watch.page.server; print(' '.join(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "ray", "vllm", "transformers"} & set(found.stdout.split())


# What is answered


def test_numbers_are_those_of_the_python_api_to_the_digit(tmp_path: Path, ask: Ask):
    run = busy(tmp_path / "run", steps=25)
    frame = cairn.Run(run.path).metrics
    found = {curve["key"]: curve for curve in ask("points", "run=run&keys=reward/mean,entropy,lr,loss")}
    for key, curve in found.items():
        assert curve["steps"] == list(frame.index)
        assert curve["values"] == frame[key].tolist()
    assert ask("row", "run=run&step=7") == next(
        row for row in RunView(run.path).metrics() if row["step"] == 7
    )
    shown = overview(RunView(run.path))
    told = ask("overview", "run=run")
    assert told["newest"] == {curve.key: curve.newest for curve in shown.curves}
    assert (told["pace"], told["shares"], told["step"]) == (shown.pace, dict(shown.shares), shown.step)
    assert told["mfu"] == shown.mfu == pytest.approx(0.35 + (10 + 25) / 2 / 1000)
    assert [one["what"] for one in told["findings"]] == [one.what for one in shown.findings]
    kept = {
        (row["step"], row["place"], row["sample"]): row
        for step in KeptRollouts(run.rollouts).steps()
        for row in KeptRollouts(run.rollouts).read(step)
    }
    best = ask("rollouts", "run=run&sort=best&count=500")["rows"]
    assert [row["reward"] for row in best] == sorted(
        (row["reward"] for row in kept.values() if row["reward"] is not None), reverse=True
    )[:500]
    for row in best:
        whole = kept[row["step"], row["place"], row["sample"]]
        assert all(row[name] == whole[name] for name in ("reward", "seconds", "tokens", "parts", "problem"))
    account = ask("goodput", "run=run")
    assert account["time"]["values"] == cairn.Run(run.path).time_account().seconds
    assert account["tokens"]["values"] == cairn.Run(run.path).token_account().tokens
    flips = ask("flips", "run=run&name=held_out&before=50&after=60")
    assert [one["problem"] for one in flips["gained"]] == [0, 1, 2]
    assert [one["problem"] for one in flips["lost"]] == [10]
    assert (flips["both"], flips["neither"], flips["unmatched"]) == (1, 3, 2)
    assert flips["chance"] == cairn.Run(run.path).flips("held_out", 50, 60).chance == 0.625
    for name, after in (("held_out", 40), ("..", 60), ("none", 60), ("", 60)):
        assert "not kept" in ask("flips", f"run=run&name={name}&before=50&after={after}", 400)["error"]
    evaluations = ask("evaluations", "run=run")
    assert evaluations[0]["steps"] == [50, 60]
    assert evaluations[0]["rows"] == run.evals.rows()


@given(
    st.dictionaries(
        st.text(max_size=5), st.one_of(st.floats(), st.integers(), st.text(), st.none(), st.booleans())
    )
)
def test_any_value_becomes_json_and_comes_back(value: dict[str, Any]):
    back = json.loads(json.dumps(plain(value), allow_nan=False))
    for name, one in value.items():
        if isinstance(one, float) and not math.isfinite(one):
            assert back[name] in ("NaN", "Infinity", "-Infinity")
            assert math.isnan(one) or float(back[name]) == one
        else:
            assert back[name] == one
            assert type(back[name]) is type(one)
    assert plain([np.float64("nan"), np.int32(3), Path("a"), b"\xff"]) == ["NaN", 3, "a", "\ufffd"]


def test_hostile_texts_arrive_as_they_are(tmp_path: Path, ask: Ask):
    hostile(tmp_path / "run")
    group = ask("group", "run=run&step=1&place=0")
    assert group["answers"][0]["text"]["text"] == HOSTILE
    assert group["answers"][0]["parts"] == {HOSTILE: 1.0}
    long = group["answers"][1]["text"]
    assert (len(long["text"]), long["characters"]) == (answers.BEGINNING, 5 + (1 << 20))
    whole = ask("conversation", "run=run&step=1&place=0&sample=1&whole=1")
    assert len(whole["text"]["text"]) == 5 + (1 << 20)
    assert HOSTILE in ask("rollouts", "run=run")["environments"]
    for name, query in QUESTIONS.items():
        ask(name, query, status=200)


@settings(max_examples=25, deadline=None)
@given(st.text(min_size=1, max_size=30), st.sampled_from(["text", "prompt", "environment", "finish_reason"]))
def test_any_text_of_a_rollout_is_found_and_shown(
    tmp_path_factory: pytest.TempPathFactory, text: str, column: str
):
    if any("\ud800" <= one <= "\udfff" for one in text):
        return  # Parquet holds UTF-8
    folder = tmp_path_factory.mktemp("any")
    run = make(folder / "run")
    keep(run, 1, [rollout(1, 0, 0, **{column: text}), rollout(1, 0, 1)])
    api = RunApi(folder)
    group = api.group("run", 1, 0)
    found = {**group["answers"][0], "prompt": group["prompt"].text, "text": group["answers"][0]["text"].text}
    assert found[column] == text
    if column in ("text", "prompt"):
        keys = api.rollouts("run", RolloutQuery(text=text))["keys"]
        assert (1, 0, 0) in keys or text.lower().encode() != _lowered(text)


def _lowered(text: str) -> bytes:
    """As Arrow has it, whose lower case differs from Python's in some letters."""
    import pyarrow.compute as pc

    return pc.call_function("utf8_lower", [[text]])[0].as_py().encode()


@pytest.mark.parametrize("state", ["damaged", "empty files", "no files", "folders"])
def test_files_in_any_state_are_no_reason_to_fail(tmp_path: Path, state: str):
    """Each question has an answer or an error that names a file; the others go on being answered."""
    run = make(tmp_path / "run") if state in ("damaged", "folders") else busy(tmp_path / "run", steps=6)
    files = [path for path in run.path.rglob("*") if path.is_file() and path != run.roles]
    if state == "damaged":
        damage(run)
    for path in files if state != "damaged" else []:
        path.unlink()
        if state == "empty files":
            path.touch()
        elif state == "folders":
            path.mkdir()
    with client(tmp_path) as page:
        for name, query in QUESTIONS.items():
            answer = page.get(f"/{TOKEN}/api/{name}?{query}")
            assert answer.status_code in (200, 400, 422), (name, answer.text)
            assert "can't be shown" not in answer.text, (name, answer.text)
        for step in (7, 8, 9) if state == "damaged" else ():
            for name in ("prompts", "group"):
                answer = page.get(f"/{TOKEN}/api/{name}?run=run&step={step}&place=0")
                assert answer.status_code == 422
                assert f"step_{step}.parquet" in answer.json()["error"]


def test_every_beginning_of_a_file_that_is_being_written_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("cairn.watch.overview.SHARE", 0)
    run = busy(tmp_path / "run", steps=3)
    api = RunApi(tmp_path)
    content = run.metrics.path.read_bytes()
    for end in range(0, len(content), 97):
        run.metrics.path.write_bytes(content[:end])
        os.utime(run.metrics.path, ns=(end, end))
        steps = content[:end].count(b"\n")
        assert api.overview("run")["step"] == steps
        assert api.timeline("run")["steps"] == steps


def test_looking_changes_nothing(tmp_path: Path, ask: Ask):
    busy(tmp_path / "run", steps=6)
    before = {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))}
    for name, query in QUESTIONS.items():
        ask(name, query)
    assert {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))} == before


def test_a_run_that_grows_is_seen_to_grow_and_a_new_one_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("cairn.watch.page.api.LOOK_SECONDS", 0.0)
    monkeypatch.setattr("cairn.watch.overview.SHARE", 0)
    run = make(tmp_path / "run", steps=2)
    keep(run, 1, [rollout(1, 0, 0)])
    api = RunApi(tmp_path)
    stamp = api.pulse("run")["stamp"]
    assert api.pulse("run")["stamp"] == stamp
    assert (api.overview("run")["step"], api.rollouts("run", RolloutQuery())["total"]) == (2, 1)
    run.metrics.append({"step": 3, "reward/mean": 0.9})
    keep(run, 2, [rollout(2, 1, 0), rollout(2, 1, 1)])
    assert api.pulse("run")["stamp"] != stamp
    assert api.overview("run")["newest"]["reward/mean"] == 0.9
    assert api.rollouts("run", RolloutQuery())["total"] == 3
    keep(run, 2, [rollout(2, 1, 0)])  # taken again, after a restart
    assert api.rollouts("run", RolloutQuery())["total"] == 2
    (run.rollouts / "step_1.parquet").unlink()  # beyond keep_rollouts_gb
    assert api.rollouts("run", RolloutQuery())["total"] == 1
    make(tmp_path / "deep" / "new")
    assert [line.id for line in api.runs()] == ["deep/new", "run"] or len(api.runs()) == 2
    with pytest.raises(UnknownRun, match="'gone'"):
        api.overview("gone")


# Rollouts, by an index

ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "reward": st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0]), st.floats(-2, 2)),
            "environment": st.sampled_from(["sums", "words"]),
            "problem": st.integers(0, 3),
            "tokens": st.integers(0, 50),
            "finish_reason": st.sampled_from(["stop", "length", None]),
            "trained": st.booleans(),
            "failed": st.sampled_from([None, None, "It Broke", "no answer in 3 s"]),
            "text": st.sampled_from(["Alpha beta", "BETA", "\u00c4rger", "", "ab" * 50]),
            "prompt": st.sampled_from(["<user>one<assistant>", "<user>Two<assistant>", ""]),
        }
    ),
    min_size=1,
    max_size=40,
)
QUERIES = st.fixed_dictionaries(
    {},
    optional={
        "first_step": st.integers(1, 3),
        "last_step": st.integers(1, 3),
        "environment": st.sampled_from(["sums", "words", "none"]),
        "problem": st.integers(0, 3),
        "reward_from": st.sampled_from([0.0, 0.5]),
        "reward_to": st.sampled_from([0.5, 1.0]),
        "failed": st.booleans(),
        "trained": st.booleans(),
        "end": st.sampled_from(["stop", "length"]),
        "text": st.sampled_from(
            ["beta", "BETA", "tw", "broke", "\u00e4RGER", "abab", "ba", "a", "zz", "assistant"]
        ),
        "sort": st.sampled_from(SORTS),
    },
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(ROWS, QUERIES, st.integers(0, 10))
def test_the_index_finds_what_looking_at_each_rollout_finds(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], query: dict[str, Any], begin: int
):
    run = make(tmp_path_factory.mktemp("index") / "run")
    rows = [rollout(1 + i % 3, i, 0, **{**row, "turns": []}) for i, row in enumerate(rows)]
    for step in (1, 2, 3):
        if own := [row for row in rows if row["step"] == step]:
            keep(run, step, own)
    index = RolloutIndex(KeptRollouts(run.rollouts))
    asked = RolloutQuery(**query)
    found = index.find(asked, begin, 7, seconds=60)
    wanted = [row for row in rows if _selected(row, asked)]
    assert (found.total, found.left, found.damaged) == (len(wanted), 0, [])
    assert sum(found.rewards.counts) == sum(row["reward"] is not None for row in wanted)
    keys = [(row["step"], row["place"], row["sample"]) for row in _in_order(wanted, asked.sort)]
    values = {(row["step"], row["place"], row["sample"]): _value(row, asked.sort) for row in wanted}
    assert [values[key] for key in found.keys] == [values[key] for key in keys[begin : begin + 7]]
    if asked.sort in ("newest", "oldest"):
        assert list(found.keys) == keys[begin : begin + 7]


def _selected(row: dict[str, Any], query: RolloutQuery) -> bool:
    reward = row["reward"]
    texts = "\n".join([row["prompt"], row["text"], row["failed"] or ""]).lower()
    return (
        (query.first_step is None or row["step"] >= query.first_step)
        and (query.last_step is None or row["step"] <= query.last_step)
        and query.environment in (None, row["environment"])
        and query.problem in (None, row["problem"])
        and (query.reward_from is None or (reward is not None and reward >= query.reward_from))
        and (query.reward_to is None or (reward is not None and reward <= query.reward_to))
        and query.failed in (None, row["failed"] is not None)
        and query.trained in (None, row["trained"])
        and query.end in (None, row["finish_reason"])
        and query.text.lower() in texts
    )


def _value(row: dict[str, Any], sort: str) -> Any:
    name = {
        "best": "reward",
        "worst": "reward",
        "slowest": "seconds",
        "longest": "tokens",
        "shortest": "tokens",
    }
    return row[name[sort]] if sort in name else row["step"]


def _in_order(rows: list[dict[str, Any]], sort: str) -> list[dict[str, Any]]:
    rows = sorted(rows, key=lambda row: (row["step"], row["place"]))
    if sort == "oldest":
        return rows
    if sort == "newest":
        return sorted(rows, key=lambda row: -row["step"])
    sign = 1 if sort in ("worst", "shortest") else -1
    return sorted(
        (row for row in rows if _value(row, sort) is not None), key=lambda row: sign * _value(row, sort)
    )


def test_a_search_looks_into_every_turn(tmp_path: Path):
    run = busy(tmp_path / "run", steps=2)
    api = RunApi(tmp_path)
    found = api.rollouts("run", RolloutQuery(text='"Name": "ADD", "ARGUMENTS'))
    rows = [row for step in (1, 2) for row in KeptRollouts(run.rollouts).read(step)]
    assert found["total"] == sum(len(row["turns"]) > 1 for row in rows) > 0


def test_what_is_not_done_in_time_is_said_and_done_by_the_next_calls(tmp_path: Path):
    run = many(tmp_path / "run", steps=30, prompts=2, samples=2)
    index = RolloutIndex(KeptRollouts(run.rollouts))
    first = index.find(RolloutQuery(), seconds=0.0)
    assert 0 < first.total < 120
    assert first.left > 0
    assert first.keys[0][0] == 30, "the newest come first"
    lefts = [first.left]
    while lefts[-1]:
        lefts.append(index.find(RolloutQuery(), seconds=0.0).left)
        assert lefts[-1] < lefts[-2]
    assert index.find(RolloutQuery(), seconds=0.0).total == 120
    searched = index.find(RolloutQuery(text="w001b"), seconds=0.0)
    assert 0 < searched.searched < 30
    while searched.left:
        searched = index.find(RolloutQuery(text="w001b"), seconds=0.0)
    assert searched.searched == 30


@given(st.lists(st.one_of(st.floats(), st.integers(-5, 5).map(float)), max_size=60))
def test_a_histogram_counts_each_number_once(values: list[float]):
    with np.errstate(over="ignore"):
        found = histogram(np.array(values, "f8"))
    assert sum(found.counts) == sum(map(math.isfinite, values))
    assert list(found.edges) == sorted(found.edges)


# Curves, groups, accounts


@given(st.lists(st.floats(), max_size=300), st.integers(3, 60))
def test_a_curve_that_is_thinned_out_keeps_its_ends_and_extremes(values: list[float], most: int):
    points = [(float(place), place, value) for place, value in enumerate(values)]
    few = curves.thin(points, most)
    assert set(place for _, place, _ in few) <= set(range(len(points)))
    assert len(few) <= most + 3
    finite = [value for value in values if math.isfinite(value)]
    shown = [value for _, _, value in few if math.isfinite(value)]
    if finite:
        assert (min(shown), max(shown)) == (min(finite), max(finite))
        assert few[-1][1] == len(points) - 1


def test_axes_grow_also_where_rows_do_not_say(tmp_path: Path):
    rows = [
        {"step": 1, "learned_tokens": 5, "time/step": 2.0},
        {"step": 2, "total_tokens": 30},
        {"step": 3, "learned_tokens": 4},
    ]
    assert curves.axis_of(rows, "tokens") == [5, 30, 34]
    assert curves.axis_of(rows, "time") == [2.0, 2.0, 2.0]


def test_advantages_are_those_of_the_orchestrator(tmp_path: Path):
    run = flat(tmp_path / "run", steps=1)
    rewards = [0.0, 1.0, 0.5, 0.25]
    rows = [rollout(1, 0, sample, reward=reward) for sample, reward in enumerate(rewards)]
    keep(run, 1, [*rows, rollout(1, 0, 4, reward=None, failed="no", trained=False)])
    group = RunApi(tmp_path).group("run", 1, 0)
    assert (group["advantages"].how, group["advantages"].exact) == ("grpo", True)
    config = json.loads(run.config.read_bytes())
    kept = [row for row in KeptRollouts(run.rollouts).read(1) if row["trained"]]
    (own,) = answers._groups(kept)
    assert [answer["advantage"] for answer in group["answers"]] == [*map(np.float32, Grpo()(own)), None]
    config["orchestrator"]["advantage"] = {"type": "this:zen", "args": {}}  # user code, which is not run here
    write_json(run.config, config)
    group = RunApi(tmp_path).group("run", 1, 0)
    assert (group["advantages"].how, group["advantages"].exact) == ("this:zen", False)
    assert "this" not in sys.modules
    assert [answer["advantage"] for answer in group["answers"]] == [-0.4375, 0.5625, 0.0625, -0.1875, None]
    assert not group["flat"]


def test_the_account_says_where_every_prompt_is(tmp_path: Path):
    run = busy(tmp_path / "run", steps=20)
    account = RunApi(tmp_path).account("run")
    assert account is not None
    rows = account.environments
    total = lambda name: sum(getattr(one, name) for one in rows)  # noqa: E731
    lost = sum(sum(one.discarded.values()) for one in rows)
    assert account.whole
    assert (total("issued"), total("trained"), total("waiting"), lost) == (129, 120, 5, 4)
    assert total("issued") == total("trained") + total("shipped") + total("waiting") + lost + total("again")
    assert account.tries == {"stale": 1}
    run.metrics.keep_through(15)  # the trainer has not done the newest batches
    account = RunApi(tmp_path).account("run")
    assert account is not None
    assert (
        sum(one.trained for one in account.environments),
        sum(one.shipped for one in account.environments),
    ) == (90, 30)
    assert accounts.branches([]) == []


def test_discarded_answers_have_their_reasons_and_costs(tmp_path: Path):
    busy(tmp_path / "run", steps=20)
    api = RunApi(tmp_path)
    while (found := api.discarded("run"))["left"]:
        pass
    reasons = {(one.reason, one.failed): 0 for one in found["groups"]}
    for one in found["groups"]:
        reasons[one.reason, one.failed] += one.answers
    assert reasons == {
        ("all answers have the same reward", False): 8,
        ("Adder.reward raised KeyError: 'anser'", True): 8,
    }
    assert found["totals"]["answers"] == 20 * 24 + 16
    assert all(one.tokens > 0 and one.seconds > 0 for one in found["groups"])


def test_checkpoints_have_their_branches_rules_and_commands(tmp_path: Path):
    busy(tmp_path / "run", steps=2)
    found = RunApi(tmp_path).checkpoints("run")
    first, second = found["branches"]
    assert (first["steps"], second["steps"]) == ([10, 20, 30, 40], [40, 50, 60])
    assert second["from"] == {"step": 30, "branch": "branch_1"}
    rows = {(row["step"], row["branch"]): row for row in found["rows"]}
    assert rows[60, "branch_2"]["kept_by"] == ["newest", "last", "every"]
    assert rows[60, "branch_2"]["resume"] == "rl @ 'my run.toml' --ckpt --ckpt.resume-step 60"
    assert rows[20, "branch_1"]["state"].startswith("damaged: ")
    assert rows[20, "branch_1"]["resume"] is None
    assert rows[40, "branch_1"]["state"] == "abandoned (branch_1)"


def test_a_step_that_waits_for_its_upload_is_said_to_be_kept_for_it(
    tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Page and `ckpt list` agree; without the run's settings no rule is made up."""
    run = busy(tmp_path / "run", steps=20)
    config = {"max_steps": 100, "ckpt": {"interval": 10, "keep_last": 1, "remote": "s3://bucket/run"}}
    write_json(run.config, config)
    kept = {row["step"]: row["kept_by"] for row in ask("checkpoints", "run=run")["rows"] if "kept_by" in row}
    assert kept[60] == ["newest", "last"]
    assert [WAITING] in kept.values()
    monkeypatch.setattr(sys, "argv", ["ckpt", "list", str(run.path), "--json"])
    assert main.ckpt() == 0
    listed = {row["step"]: row["kept_by"] for row in json.loads(capsys.readouterr().out) if "kept_by" in row}
    assert listed == kept
    run.config.unlink()
    found = ask("checkpoints", "run=run")
    assert not any(row.get("kept_by") for row in found["rows"])
    assert "settings are not here" in found["warnings"][0]


def test_steps_lie_on_the_clock_across_attempts():
    history = [
        {"event": "attempt", "time": 1000.0, "number": 1, "idle": 0.0},
        {"event": "attempt", "time": 1100.0, "number": 2, "idle": 60.0},
    ]
    rows = [
        {"step": 1, "time/wait": 5.0, "time/step": 10.0, "run/wall_seconds": 30.0},
        {"step": 2, "time/wait": 1.0, "time/step": 2.0, "run/wall_seconds": 55.0},
    ]
    first, second = events.step_spans(rows, history)
    assert (first.begin, first.work, first.end) == (1015.0, 1020.0, 1030.0)
    assert second.end == 1000 + 60 + 55, "the idle time lies between the attempts"
    assert events.step_spans([{"step": 1, "time/step": 2.0}], [])[0].end == 2.0


def test_the_time_line_is_of_what_was_recorded():
    """Each role in its lane; micro-batches are one step, and steps older than the spans lie by their rows."""
    steps = [events.StepSpan(step, 10.0 * step, 10.0 * step + 4, 10.0 * step + 9) for step in (1, 2, 3)]
    recorded = [
        TimeSpan("trainer_rank0", MAIN, "waiting for batch 2", 19.5, 4.5, {"waiting": True}),
        TimeSpan("trainer_rank0", MAIN, "step 2, micro-batch 0", 24.0, 2.0, {}),
        TimeSpan("trainer_rank0", MAIN, "step 2, micro-batch 1", 26.0, 3.0, {}),
        TimeSpan("trainer_rank0", MAIN, "finishing after step 2", 29.0, 1.0, {}),
        TimeSpan("trainer_rank0", "saves", "saving", 29.0, 0.5, {"step": 2}),
        TimeSpan("trainer_rank1", MAIN, "step 2, micro-batch 0", 24.0, 5.0, {}),
        TimeSpan("orchestrator", "servers", "generating", 19.0, 5.0, {}),
        TimeSpan("orchestrator", "weights", "pushing weights", 29.0, 0.5, {}),
        TimeSpan("orchestrator", "environments", "rewarding", 23.0, 1.0, {}),
        TimeSpan("uploader", MAIN, "waiting for a step to upload", 19.0, 10.0, {"waiting": True}),
        TimeSpan("uploader", MAIN, "uploading step 1", 29.0, 10.0, {}),
        TimeSpan("orchestrator", "servers", "generating", 1.0, 5.0, {}),
    ]
    found = events.lanes(recorded, steps)
    assert [(bar.begin, bar.end, bar.kind, bar.step) for bar in found["trainer"]] == [
        (10.0, 14.0, "waiting", 1),
        (14.0, 19.0, "computing", 1),
        (19.5, 24.0, "waiting", 2),
        (24.0, 29.0, "computing", 2),
        (29.0, 30.0, "other", 2),
    ]
    rest = {name: [(bar.kind, bar.text) for bar in bars] for name, bars in found.items() if name != "trainer"}
    assert rest == {
        "saves": [("saves", "saving step 2")],
        "servers": [("servers", "generating"), ("weights", "pushing weights")],
        "rewards": [("rewards", "rewarding")],
        "uploads": [("uploads", "uploading step 1")],
    }
    (only,) = events.lanes([], steps).values()
    assert [bar.step for bar in only] == [1, 1, 2, 2, 3, 3]


def test_logs_say_each_error_once_and_can_be_read_backwards(tmp_path: Path):
    run = busy(tmp_path / "run", steps=1)
    (error, warning) = events.log_errors(run.logs)
    assert (error.level, error.text, error.count, error.log) == (
        "error",
        "KeyError: 'anser'",
        40,
        "orchestrator.log",
    )
    assert error.details[-1] == "KeyError: 'anser'"
    assert 'File "my_env.py", line 23' in "\n".join(error.details)
    assert (warning.level, warning.count) == ("warning", 1)
    lines = [f"line {number} " + "x" * 90 for number in range(5000)]
    (run.logs / "trainer.log").write_text("\n".join(lines) + "\n")
    found, before = list[str](), None
    while before != 0:
        page = events.log_page(run.logs, "trainer.log", before)
        found, before = [*page.lines[:-1], *found], page.begin
    assert found == lines
    (run.logs / "secret").symlink_to(run.config)
    assert "secret" not in [log.name for log in events.log_files(run.logs)]


def test_a_token_has_its_text_logprob_and_policy(tmp_path: Path, ask: Ask):
    run = make(tmp_path / "run")
    keep(run, 3, [rollout(3, 0, 0, text="one two three four")])
    found = ask("tokens", "run=run&step=3&place=0&sample=0")
    assert found["ids"] == [ord(letter) for letter in "ottf"]
    assert found["versions"] == [1, 1, 2, 2]
    assert len(found["logprobs"]) == 4
    assert found["texts"] is None, "the run's tokenizer is gone"
    assert (
        "there is no turn 1" in ask("tokens", "run=run&step=3&place=0&sample=0&turn=1", status=400)["error"]
    )


# The command


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["dash", *map(str, arguments)])
        code = main.dash()
        return code, capfd.readouterr().err

    return run


def test_a_port_in_use_and_a_folder_that_is_not_there_are_told(tmp_path: Path, command: Callable):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, said = command(tmp_path, "--port", port)
    assert (code, f"--port {port}: is in use" in said) == (2, True)
    code, said = command(tmp_path / "nowhere")
    assert (code, "there is no such folder" in said) == (2, True)
    code, said = command(tmp_path, "--port", 70000)
    assert (code, "--port" in said and "65535" in said) == (2, True)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", int, str]]:
    """The command as users start it, at a free port: the process, the port and the token."""
    make(tmp_path / "run")
    code = "import sys; from cairn.launch.main import dash; sys.exit(dash())"
    command = [sys.executable, "-c", code, str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("1 run in ")
            match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]{32})/\n", process.stdout.readline())
            assert match
            yield process, int(match[1]), match[2]
        finally:
            process.kill()


@pytest.mark.slow
def test_a_page_listens_on_this_machine_only_and_ends_with_ctrl_c(
    served: tuple["subprocess.Popen[str]", int, str],
):
    process, port, token = served
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        question = f"GET /{token}/api/runs HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        connection.sendall(question.encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b'"id": "run"' in answer
    with pytest.raises(ConnectionRefusedError):  # only 127.0.0.1 itself is listened on
        socket.create_connection(("127.0.0.2", port), timeout=10)
    process.send_signal(2)
    assert process.wait(60) == 0
