"""The page in a real browser: what a newcomer sees, live runs, hostile texts, keys, and whom it asks."""

import csv
import json
import os
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import PROGRAM, WHY_NOT, Browser, browser
from recorded_runs import (
    HEALTHY,
    HOSTILE,
    busy,
    damage,
    evaluations,
    flat,
    hostile,
    keep,
    make,
    many,
    rollout,
)
from served import served

import cairn
from cairn.orchestrator.rollout_log import KeptRollouts
from cairn.run.locked_folder import lock
from cairn.run.trained_tokens import TrainedTokens, digest_of

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)

VIEWS = ("overview", "rollouts", "discarded", "ledger", "checkpoints", "evaluations", "timeline", "logs")
SIZES = {"laptop": (1280, 800), "wide": (1920, 1080)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of each kind."""
    folder = tmp_path_factory.mktemp("runs")
    flat(folder / "flat")
    busy(folder / "busy")
    hostile(folder / "hostile")
    damage(make(folder / "damaged"))
    make(folder / "sft", "sft", steps=30, loss=2.5)
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(folder) as address:
        yield address


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


@pytest.fixture
def page(tab: Browser, address: str) -> Iterator[Browser]:
    """The page's beginning; at the end of a test nothing has gone wrong in it, and nobody else was asked."""
    tab.size(*SIZES["laptop"])
    tab.errors.clear()
    tab.requests.clear()
    tab.open(address)
    yield tab
    assert tab.errors == []
    origin = address.split("/")[2]
    assert [one for one in tab.requests if one.split("/")[2:3] != [origin] and one != "about:blank"] == []


def each(selector: str, what: str) -> str:
    """The script that has something of each element, `one`."""
    return f"[...document.querySelectorAll({json.dumps(selector)})].map(one => {what})"


def asked(address: str, question: str) -> Any:
    """An answer of the server."""
    with urllib.request.urlopen(f"{address}api/{question}") as answer:
        return json.load(answer)


def test_a_newcomer_finds_why_a_run_does_not_learn(page: Browser):
    """The list of runs says which, one click says why, the next one shows it, without scrolling."""
    page.sees("no spread, nothing learned", "#runs")
    page.click('#side .run[data-run="flat"]')
    page.sees("96 of 96 prompts taught nothing in steps 1 to 12 (all answers alike: 96 all wrong).")
    page.sees("easier ones, a reward for parts of it, or raise orchestrator.samples_per_prompt")
    ends = page.run(each(".findings li", "one.getBoundingClientRect().bottom"))
    assert max(ends) < SIZES["laptop"][1]
    page.click("#look")
    page.sees("8 of 8 prompts without spread")
    page.sees("no spread: every answer has the same reward")
    assert page.run("document.querySelectorAll('.answer').length") == 8


def test_a_click_on_a_curve_opens_the_answers_of_its_step(page: Browser, folder: Path):
    page.go("run=busy")
    page.wait("document.querySelector('[data-key=\"reward/mean\"] .value')?.dataset.exact")
    page.click('[data-key="reward/mean"] canvas', x=0.5)
    page.sees("prompts", "#view .bar-line + .bar-line, #view")
    step = int(page.wait("new URLSearchParams(location.hash.slice(1)).get('step')"))
    assert 25 < step < 35
    page.sees("advantage")
    rows = [row for row in KeptRollouts(folder / "busy" / "rollouts").read(step)]
    place = int(page.wait("document.querySelector('.prompt.current')?.dataset.place"))
    rewards = [repr(row["reward"]) for row in rows if row["place"] == place]
    shown = page.wait(each(".answer .reward", "one.dataset.exact"))
    assert [float(one) for one in shown] == [float(one) for one in rewards]


def test_numbers_are_those_of_the_python_api(page: Browser, folder: Path):
    page.go("run=busy")
    page.wait("document.querySelectorAll('.charts .value[data-exact]').length == 8")
    page.sees(f"MFU\n{100 * cairn.Run(folder / 'busy').overview().mfu:.0f} %", "#head")
    keys = page.run(each(".charts section", "one.dataset.key"))
    shown = dict(zip(keys, page.run(each(".charts .value", "one.dataset.exact")), strict=True))
    frame = cairn.Run(folder / "busy").metrics
    assert {key: float(value) for key, value in shown.items()} == {
        key: frame[key].dropna().iloc[-1] for key in shown
    }
    page.go("run=busy&view=rollouts&list=1&sort=best")
    page.wait("document.getElementById('total')?.dataset.left == '0'")
    best = page.wait(each("#rollouts b[data-exact]", "one.dataset.exact"))
    assert set(map(float, best)) == {1.0}
    page.go("run=busy&view=ledger")
    page.sees("377 issued = 360 trained + 5 waiting + 12 discarded", "#sum")
    page.go("run=busy&view=timeline")
    for name, account in (
        ("time", cairn.Run(folder / "busy").time_account().seconds),
        ("tokens", cairn.Run(folder / "busy").token_account().tokens),
    ):
        cells = f'[data-account="{name}"] [data-kind]'
        page.wait(f"document.querySelector({json.dumps(cells)})")
        shown = page.run(each(cells, "[one.dataset.kind, Number(one.dataset.exact)]"))
        assert dict(shown) == {kind: value for kind, value in account.items() if value > 0}
    rects = page.run(each("rect[data-lane]", "[one.dataset.lane, one.dataset.kind, one.textContent]"))
    kinds = {(lane, kind) for lane, kind, _ in rects}
    assert kinds == {
        *(("trainer", kind) for kind in ("computing", "waiting")),
        *(("servers", kind) for kind in ("servers", "weights")),
        *((lane, lane) for lane in ("rewards", "saves")),
    }
    computed = {words.partition(":")[0] for _, kind, words in rects if kind == "computing"}
    assert computed == {f"step {step}" for step in range(1, 61)}
    page.go("run=busy&view=checkpoints")
    kept = page.wait(each("#steps tbody tr", "one.children[5].textContent"))
    assert kept[0] == "newest, last, every"
    page.go("run=busy&view=evaluations")
    page.click('[data-evaluation="held_out"] summary')
    found = cairn.Run(folder / "busy").flips("held_out", 50, 60)
    page.sees("If flips went either way by chance, so uneven a split would have a chance of")
    (counts,) = page.run(each("[data-gained]", "[one.dataset.gained, one.dataset.lost]"))
    assert counts == [str(len(found.gained)), str(len(found.lost))]


def test_a_curve_that_varies_in_its_last_digits_alone_looks_flat(page: Browser):
    def scaled(low: float, high: float) -> list[float]:
        return page.run(f"import('./chart.js').then(chart => chart.scaled({low}, {high}))")

    low, high = scaled(2.0, 2.000001)
    assert high - low == pytest.approx(2e-3, rel=1e-3)
    assert scaled(0.5, 0.6) == [0.5, 0.6]
    assert scaled(0, 0) == [-0.5, 0.5]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("run", ["busy", "hostile", "damaged", "sft"])
def test_every_view_fits_and_works(page: Browser, run: str, size: str):
    page.size(*SIZES[size])
    for view in VIEWS:
        page.go(f"run={run}&view={view}")
        page.wait(
            f"document.querySelector('nav.tabs a.on')?.dataset.view == '{view}' || {json.dumps(run == 'sft')}"
        )
        page.wait("document.querySelector('#view').innerText.trim().length > 10")
        page.run("new Promise(done => setTimeout(done, 300))")
        assert page.run("document.documentElement.scrollWidth <= innerWidth"), (view, size)
    assert page.run("document.title").endswith("Cairn")
    # What can't be read is told with an error of the server, which the browser notes as one.
    if run == "damaged":
        page.errors[:] = [one for one in page.errors if "422" not in one]


def test_hostile_texts_are_shown_and_not_executed(page: Browser):
    page.go("run=hostile&view=rollouts&step=1&place=0")
    page.wait("document.querySelectorAll('.answer').length == 3")
    texts = page.run(each(".answer .text", "one.textContent"))
    assert "<script>document.title = 'owned'</script><img src=x onerror=" in texts[0]
    assert r"\x1b[2J\x07\x00" in texts[0]
    assert r"\u202egnitirw\u202c" in texts[0], "the direction of what follows stays as it is"
    assert "\u05e9\u05dc\u05d5\u05dd" in texts[0]
    for view in VIEWS:
        page.go(f"run=hostile&view={view}")
        page.run("new Promise(done => setTimeout(done, 300))")
        active = "#app script, #app img:not([src='icon.svg']), #app [onerror]"
        found = page.run(f"[document.querySelectorAll({json.dumps(active)}).length, document.title]")
        assert found == [0, "hostile \u00b7 Cairn"]
    assert page.run("document.querySelector('#view').innerText").count("Traceback") == 0
    page.go("run=hostile&view=rollouts&step=1&place=0")
    page.click('.answer[data-sample="1"] > div > button')
    page.wait(
        f"document.querySelector('.answer[data-sample=\"1\"] .text').textContent.length == {5 + (1 << 20)}"
    )
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert HOSTILE.startswith("<script>")


def test_markup_can_not_even_be_parsed_by_mistake(page: Browser):
    """The browser itself refuses it in this page, and scripts from anywhere else."""
    page.run("window.tried = run => { try { return String(run()); } catch (error) { return error.name; } }")
    refused = page.run("tried(() => { document.body.innerHTML = '<b>x</b>'; })")
    assert refused == "TypeError"
    assert page.run("fetch('http://127.0.0.1:1/').then(() => 'no', error => error.name)") == "TypeError"
    assert page.run("tried(() => eval('1'))") == "EvalError"
    policy = [
        one for one in page.errors if "Trusted" in one or "Content Security Policy" in one or "Refused" in one
    ]
    assert policy
    page.errors.clear()


def test_a_live_run_is_followed(page: Browser, folder: Path):
    """Its steps, its rollouts and its end appear without a key or a click; so does a run that begins."""
    run = make(folder / "live", "rl", "running", 2, **{"reward/mean": 0.25})
    keep(run, 1, [rollout(1, 0, sample) for sample in range(3)])
    evaluations(run)
    lock(run)
    try:
        page.wait("document.querySelector('#side .run[data-run=\"live\"]')")
        page.click('#side .run[data-run="live"]')
        page.sees("2 of 10", "#head")
        page.sees("live", "#head .live")
        for step in (3, 4, 5):
            run.metrics.append({"step": step, **HEALTHY, "reward/mean": step / 7})
        page.sees("5 of 10", "#head")
        page.wait(f"document.querySelector('[data-key=\"reward/mean\"] .value').dataset.exact == '{5 / 7!r}'")
        page.click("#view details summary")
        page.run("document.querySelector('input[list=metrics]').focus()")
        page.type("loss")
        run.metrics.append({"step": 6, **HEALTHY, "reward/mean": 0.75})
        page.wait("document.querySelector('[data-key=\"reward/mean\"] .value').dataset.exact == '0.75'")
        assert page.run("document.querySelector('#view details').open")
        assert page.run("document.querySelector('input[list=metrics]').value") == "loss"
        page.go("run=live&view=evaluations")
        page.click("#view details summary")
        page.sees("from wrong to right")
        page.run("document.querySelector('[aria-label=before]').value = '60'")
        run.evals.append({"step": 70, "name": "held_out", "reward": 0.875})
        page.sees("0.875")
        assert page.run("document.querySelector('#view details').open")
        assert page.run("document.querySelector('[aria-label=before]').value") == "60"
        page.go("run=live&view=rollouts&step=1&place=0&sample=1")
        page.click(".turn.said h3 button")
        page.wait("document.querySelectorAll('.tokens span').length")
        run.metrics.append({"step": 7, **HEALTHY, "reward/mean": 0.5})
        page.sees("7 of 10", "#head")
        page.run("new Promise(done => setTimeout(done, 300))")
        assert page.run("document.querySelectorAll('.tokens span').length")
        page.go("run=live&view=rollouts&list=1")
        page.wait("document.getElementById('total')?.dataset.exact == '3'")
        keep(run, 2, [rollout(2, 1, sample) for sample in range(4)])
        page.wait("document.getElementById('total')?.dataset.exact == '7'")
        page.go("run=live&view=logs")
        page.sees("There is no log yet")
        (run.logs / "trainer.log").write_text("INFO first\n")
        page.go("run=live&view=logs&log=trainer.log")
        page.sees("INFO first", "#log")
        with open(run.logs / "trainer.log", "a") as log:
            log.write("INFO second\n")
        page.sees("INFO second", "#log")
    finally:
        run.set_role("trainer", "done")
        run.unlock()
    page.sees("done", "#head .state")


def test_keys_lead_through_a_run_and_the_address_holds_what_is_shown(page: Browser, address: str):
    def state(name: str) -> str | None:
        return page.run(f"new URLSearchParams(location.hash.slice(1)).get('{name}')")

    page.go("run=busy")
    page.sees("Curves")
    page.key("2")
    page.wait("document.querySelector('.prompt.current')")
    assert (state("view"), state("step")) == ("rollouts", "60")
    page.key("ArrowLeft")
    page.wait("new URLSearchParams(location.hash.slice(1)).get('step') == '59'")
    page.wait("document.querySelector('.prompt.current')?.dataset.place == '359'")
    page.key("j")
    page.wait("document.querySelector('.prompt.current')?.dataset.place == '360'")
    page.key("k")
    page.wait("document.querySelector('.prompt.current')?.dataset.place == '359'")
    page.wait("document.querySelectorAll('.answer').length == 4")
    page.key("Enter")
    page.sees("shown to the model")
    kept = page.run("location.hash")
    page.key("Escape")
    page.wait("document.querySelectorAll('.answers .answer').length == 4")
    page.key("/")
    page.wait("document.activeElement.id == 'search'")
    page.type("gives her 19")
    page.key("Enter")
    page.wait("document.getElementById('total')?.dataset.exact == '16'")
    page.key("Escape")
    page.key("j")
    page.wait("document.querySelector('#rollouts tr.current')")
    page.key("Enter")
    page.sees("shown to the model")
    page.open(f"{address}{kept}")
    page.sees("rollout 59/359/0")
    page.key("Escape")
    page.key("Escape")
    page.wait("document.querySelector('nav.tabs a.on')?.dataset.view == 'overview'")


def test_a_bar_of_the_histogram_selects_its_rollouts(page: Browser):
    page.go("run=busy&view=rollouts&list=1")
    page.wait("document.getElementById('total')?.dataset.left == '0'")
    count = page.run("[...document.querySelectorAll('.histogram .bar')].at(-1).dataset.count")
    page.click(".histogram .bar:last-of-type .back")
    page.wait(f"document.getElementById('total')?.dataset.exact == '{count}'")
    shown = page.run(each("#rollouts b[data-exact]", "one.dataset.exact"))
    assert len(set(shown)) == 1


def test_a_curve_is_saved_as_a_table_and_as_a_picture(page: Browser, folder: Path, tmp_path: Path):
    saved = tmp_path / "saved"
    page.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(saved))
    page.go("run=busy&with=flat&axis=tokens")
    page.wait("document.querySelector('[data-key=\"reward/mean\"] .value')?.dataset.exact")
    page.run("document.querySelector('[data-key=\"reward/mean\"] .tools button:nth-child(2)').click()")
    page.run("document.querySelector('[data-key=\"reward/mean\"] .tools button:nth-child(1)').click()")
    table, picture = _arrived(saved / "reward_mean.csv"), _arrived(saved / "reward_mean.png")
    rows = list(csv.DictReader(table.decode().splitlines()))
    frame = cairn.Run(folder / "busy").metrics
    own = [row for row in rows if row["run"] == "busy"]
    assert [float(row["reward/mean"]) for row in own] == frame["reward/mean"].tolist()
    assert [float(row["tokens"]) for row in own] == frame["total_tokens"].tolist()
    assert {row["run"] for row in rows} == {"busy", "flat"}
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 5000


def _arrived(path: Path) -> bytes:
    deadline = time.monotonic() + 60
    while not path.is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    return path.read_bytes()


def test_several_runs_lie_over_each_other(page: Browser):
    page.go("run=busy")
    page.click('#side .run[data-run="flat"] input')
    page.wait("new URLSearchParams(location.hash.slice(1)).getAll('with').join() == 'flat'")
    page.wait("document.querySelectorAll('#side .name .dot').length == 2")
    page.wait("document.querySelector('[data-key=\"reward/mean\"] .value')?.dataset.exact")
    page.run("document.querySelector('[data-key=\"reward/mean\"] canvas').focus()")
    page.key("ArrowLeft")
    for _ in range(55):
        page.key("ArrowLeft")
    page.sees("flat", '[data-key="reward/mean"] .tip')
    assert re.search(r"step \d+\s+busy [\d.]+\s+flat 0", page.text('[data-key="reward/mean"] .tip'))


def test_whoever_lacks_the_token_gets_nothing(page: Browser, address: str):
    origin = address.rsplit("/", 2)[0]
    for path in ("/", "/api/runs", "/main.js", "/wrong/api/overview?run=busy"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{origin}{path}")
        assert refused.value.code == 401
        assert b"busy" not in refused.value.read()
    assert page.run("document.cookie") == ""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_gets_nothing(page: Browser, address: str):
    """Neither an answer, nor the token from what that user can read of the processes here."""
    port, token = re.findall(r"http://127\.0\.0\.1:(\d+)/(.+)/", address)[0]
    asks = r"printf 'GET / HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n' >&3; cat <&3"
    reads = "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null"
    command = ["/bin/bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}; {asks}; {reads}"]
    other = {"user": 65534, "group": 65534, "extra_groups": [], "env": {}, "cwd": "/"}
    found = subprocess.run(command, **other, capture_output=True).stdout
    assert found.startswith(b"HTTP/1.1 401 ")
    assert b"--port" in found, "command lines of others can be read here"
    assert token.encode() not in found


def test_tokens_are_coloured_by_logprob_and_by_policy(page: Browser):
    page.go("run=busy&view=rollouts&step=40&place=241&sample=1")
    page.sees("shown to the model")
    page.run("[...document.querySelectorAll('.turn.said h3 button')][0].click()")
    page.wait("document.querySelectorAll('.tokens span').length > 5")
    titles = page.run(each(".tokens span", "one.title"))
    assert re.fullmatch(r"token 0: id \d+, logprob -[\d.]+, chance [\d.]+ %, policy of step 38", titles[0])
    assert titles[-1].endswith("policy of step 39")
    page.run("document.querySelector('[data-kind=version]').click()")
    colours = page.run(
        "new Set([...document.querySelectorAll('.tokens span')].map(one => one.style.background)).size"
    )
    assert colours == 2


def test_tokens_are_coloured_by_what_the_trainer_computed(page: Browser, folder: Path):
    """The numbers are those of the Python API."""
    run = cairn.Run(folder / "busy")
    rows = KeptRollouts(folder / "busy" / "rollouts").read(41)
    asked = [(row["place"], turn) for row in rows for turn in row["turns"][:1] if row["sample"] == 0]
    place, said = asked[0]
    ids, sampled = np.array(said["token_ids"], np.int32), np.array(said["logprobs"], np.float32)
    trained = {
        "lengths": np.array([len(ids) - 1], np.int32),  # its row was too short for the last one
        "prompts": np.array([digest_of(np.array(said["prompt_ids"], np.int32))], np.uint64),
        "token_ids": ids[:-1],
        "sampler_logprobs": sampled[:-1],
        "logprobs": sampled[:-1] + np.linspace(-0.5, 0.25, len(ids) - 1, dtype=np.float32),
    }
    TrainedTokens(folder / "busy" / "tokens").write(41, 0, 1, [trained], 1.0)
    page.go(f"run=busy&view=rollouts&step=41&place={place}&sample=0")
    page.click(".turn.said h3 button")
    page.wait(f"document.querySelectorAll('.tokens span').length == {len(ids)}")
    kinds = page.run(each("[data-kind]", "one.dataset.kind"))
    assert kinds[:4] == ["gap", "ratio", "logprob", "mask"], "no entropies were computed"
    titles = page.run(each(".tokens span", "one.title"))
    frame = run.tokens(41)
    own = frame[(frame["place"] == place) & (frame["sample"] == 0) & (frame["turn"] == 0)]
    gaps = [float(found[1]) for title in titles if (found := re.search(r", gap (-?[\d.e-]+),", title))]
    assert gaps == pytest.approx(own["gap"].dropna().tolist(), rel=1e-6)
    assert [title.count("not learned") for title in titles] == [0] * (len(ids) - 1) + [1]
    page.sees("the largest gap to the trainer, -0.5, is at token 0")
    page.click("[data-kind=mask]")
    page.sees("blue: learned from")
    colours = page.run(each(".tokens span", "one.style.background"))
    assert len(set(colours[:-1])) == 1
    assert colours[-1] != colours[0]


@pytest.mark.soak
def test_a_million_rollouts_answer_below_a_second(tmp_path: Path, tab: Browser):
    """Each filter, sort and search once the files are read; what is read is shown before that."""
    many(tmp_path / "runs" / "big")
    queries = ("sort=best", "sort=slowest", "reward_from=0.3&reward_to=0.31", "problem=77", "text=w002cc")
    with served(tmp_path / "runs") as address:
        begun = time.monotonic()
        tab.open(f"{address}#run=big&view=rollouts&list=1")
        tab.wait("Number(document.getElementById('total')?.dataset.exact) > 0")
        print(f"first rollouts after {time.monotonic() - begun:.2f} s")
        tab.wait("document.getElementById('total')?.dataset.left == '0'")
        print(f"all after {time.monotonic() - begun:.2f} s")
        assert tab.run("document.getElementById('total').dataset.exact") == "1000000"
        while asked(address, "rollouts?run=big&text=w001b%20w010")["left"]:
            pass
        for query in (*queries, "begin=900000", "environment=words&sort=worst"):
            begun = time.monotonic()
            assert asked(address, f"rollouts?run=big&{query}")["left"] == 0
            took = time.monotonic() - begun
            print(f"{took:.2f} s: {query}")
            assert took < 1.0, query
