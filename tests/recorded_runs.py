"""Run directories as runs leave them, made without one: for tests of whoever looks at runs."""

import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cairn.checkpoint.store import CheckpointStore
from cairn.orchestrator.ledger import FORMAT, Ledger, LedgerRun, to_ranges
from cairn.orchestrator.prompt_order import Portion
from cairn.orchestrator.rollout_log import SCHEMA, KeptRollouts
from cairn.orchestrator.rollouts import AnswerGroup, Rollout
from cairn.run.directory import RunDirectory
from cairn.run.files import write_json
from cairn.run.messages import Attempt, ShippedBatch
from cairn.run.spans import MAIN, Recorder
from cairn.watch.page.events import step_spans

ATTEMPT = Attempt("5eed", 1, "rl", 0, None, "branch_1")
BEGAN = time.time() - 400
HEALTHY = {"grad_norm": 0.3, "learned_tokens": 400, "reward/mean": 0.4, "time/step": 2.0, "time/wait": 0.5}
FLAT = HEALTHY | {"groups": 8, "groups/unlearned": 8, "groups/all_worst": 8, "groups/all_best": 0}
ABOUT = {"run_id": "5eed", "attempt": 1, "branch": "branch_1", "parent": None, "parts": ["trainer"],
         "world_size": 1, "dtypes": {}, "metrics": {}, "versions": {}, "config_digest": ""}  # fmt: skip
PROGRAM = """You can call tools.
<tools>
{"name": "add", "parameters": {"a": "integer", "b": "integer"}}
</tools>"""
HOSTILE = (
    "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"
    "\x1b[2J\x07\x00 tab\t \u202egnitirw\u202c \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 "
    "</pre></textarea><a href='javascript:alert(1)'>x</a> &lt;b&gt; \ud7ff {{7*7}} ${7*7}"
)


def make(path: Path, command: str = "rl", state: str = "done", steps: int = 4, **row: Any) -> RunDirectory:
    """A run of so many steps, each of which has this row."""
    run = begin(path, command)
    for step in range(1, steps + 1):
        run.metrics.append({"step": step, **HEALTHY, **row})
    run.set_role("trainer", state)
    return run


def begin(path: Path, command: str = "rl", **config: Any) -> RunDirectory:
    """A run that has begun."""
    run = RunDirectory(path)
    run.heartbeats.mkdir(parents=True)
    run.logs.mkdir()
    write_json(run.config, {"max_steps": 10, "ckpt": None, **config})
    run.begin(Attempt("5eed", 1, command, 0, None, "branch_1"))
    argv = [command, "@", "my run.toml", "--ckpt"]
    run.history.append(
        {"time": BEGAN, "event": "attempt", "number": 1, "idle": 0.0, "argv": argv, "folder": ""}
    )
    return run


def turn(prompt: str, text: str, step: int, *, branch: int = 0, end: str | None = "stop") -> dict[str, Any]:
    """A turn of as many tokens as words."""
    count = max(len(text.split()), 1)
    half = count // 2
    versions = [(step - 2, 0, half), (step - 1, half, count)] if half and step > 1 else [(step - 1, 0, count)]
    return {
        "branch": branch,
        "kept": 0,
        "prompt": prompt,
        "text": text,
        "finish_reason": end,
        "prompt_ids": [1] * len(prompt.split()),
        "token_ids": [min(ord(word[0]), 255) for word in text.split() or ["a"]],
        "logprobs": [-0.01 - (7 * place % 11) / 3 for place in range(count)],
        "versions": [
            {"version": f"5eed:branch_1:{policy}", "start": first, "end": last}
            for policy, first, last in versions
        ],
    }


def rollout(step: int, place: int, sample: int, **other: Any) -> dict[str, Any]:
    """A kept rollout of one turn, unless `turns` says otherwise."""
    row = {
        "step": step, "place": place, "sample": sample, "problem": 100 + place, "environment": "sums",
        "trained": True, "policy_step": step - 1, "prompt": f"<user>What is {place} and {sample}?<assistant>",
        "text": f"It is {place + sample}.", "reward": (place + sample) % 4 / 4, "parts": [], "failed": None,
        "finish_reason": "stop", "seconds": 1.5, "diverged": 0, **other,
    }  # fmt: skip
    row.setdefault("turns", [turn(row["prompt"], row["text"], step, end=row["finish_reason"])])
    row.setdefault("tokens", sum(len(one["token_ids"]) for one in row["turns"]))
    return row


def keep(run: RunDirectory, step: int, rows: Sequence[dict[str, Any]]) -> None:
    """Keep these rollouts of a step."""
    KeptRollouts(run.rollouts).write(step, rows, ATTEMPT, math.inf)


def flat(path: Path, steps: int = 12) -> RunDirectory:
    """A run that does not learn, since all answers to a prompt are wrong."""
    run = begin(path, "rl", max_steps=40, orchestrator={"advantage": {"type": "grpo", "args": {}}})
    for step in range(1, steps + 1):
        noise = (step * 37 % 11) / 1000
        row = {"reward/mean": 0.0, "grad_norm": 0.0, "loss": 0.0, "rollout/cut_off": 0.1}
        row |= {"rollout/length": 30 + noise, "entropy": 2.0 + noise}
        run.metrics.append({"step": step, **FLAT, **row})
        rows = [
            rollout(step, 8 * step + place, sample, reward=0.0) for place in range(8) for sample in range(8)
        ]
        keep(run, step, rows)
    run.set_role("trainer", "done")
    return run


def busy(path: Path, steps: int = 60) -> RunDirectory:
    """A run with all that can be shown: tools, failures, environments, restarts, branches, evaluations."""
    run = begin(
        path,
        "rl",
        max_steps=100,
        ckpt={"interval": 10, "keep_last": 3, "keep_every": 30},
        orchestrator={"advantage": {"type": "grpo", "args": {}}},
    )
    draw, wall = random.Random(0), 40.0
    ledger = Ledger(run.ledger, _ledger_run(), None, 0)
    shipped = place = 0
    for step in range(1, steps + 1):
        wait, work = 0.5 + draw.random() * 2, 2 + draw.random()
        wall += wait + work
        reward = 0.2 + 0.5 * (1 - math.exp(-step / 25)) + draw.gauss(0, 0.03)
        run.metrics.append(
            {
                **{
                    "step": step,
                    "loss": draw.gauss(0, 0.1),
                    "grad_norm": 0.4 + draw.random() / 3,
                    "lr": 1e-4,
                },
                **{"reward/mean": reward, "reward/std": 0.3, "rollout/length": 40 - step / 4 + draw.random()},
                **{"entropy": 2.2 * math.exp(-step / 90), "kl/reference": step / 2000, "staleness/mean": 0.5},
                **{"groups": 6, "groups/unlearned": draw.randrange(3), "rollout/cut_off": 0.05},
                **{"learned_tokens": 3000, "total_tokens": 3600 * step, "time/step": work, "time/wait": wait},
                **{
                    "mfu": 0.35 + step / 1000,
                    "time/generate": wait + 1,
                    "time/server_idle": 0.4,
                    "time/push": 0.2,
                    "run/wall_seconds": wall,
                    "run/useful_seconds": wall - 40,
                },
                **({"time/save": 1.2, "time/save_stall": 0.15} if step % 10 == 1 else {}),
                **(
                    {"eval/held_out/reward": reward - 0.05, "eval/held_out/step": step}
                    if step % 10 == 0
                    else {}
                ),
            }
        )
        rows: list[dict[str, Any]] = []
        places = list(range(place, place + 6))
        place += 7 if step % 5 == 0 else 6
        for one in places:
            ledger.issue(AnswerGroup(one, ledger.run.order.at(one).problem, step - 1, [1, 2], []))
            rows += [_answer(step, one, sample, reward, draw) for sample in range(4)]
        if step % 5 == 0:
            given_up = AnswerGroup(
                place - 1, ledger.run.order.at(place - 1).problem, step - 1, [1, 2], [Rollout(1)]
            )
            ledger.issue(given_up)
            reason = (
                "all answers have the same reward" if step % 10 else "Adder.reward raised KeyError: 'anser'"
            )
            ledger.fail(given_up, reason, step)
            why = None if step % 10 else reason
            rows += [
                _answer(
                    step,
                    place - 1,
                    sample,
                    reward,
                    draw,
                    trained=False,
                    failed=why,
                    reward_=None if why else 0.0,
                )
                for sample in range(4)
            ]
        batch = ShippedBatch(step, to_ranges(places), 24, 3600, f"digest {step}", max(step - 2, 0))
        ledger.ship(batch, {one: ledger.run.order.at(one).problem for one in places})
        shipped = step
        keep(run, step, rows)
        if step % 20 == 0:  # its answers were too old; it is issued again with the next batch
            stale = AnswerGroup(place, ledger.run.order.at(place).problem, step - 2, [1, 2], [Rollout(1)])
            ledger.issue(stale)
            ledger.drop(place, "stale", step)
    for one in range(place, place + 5):
        ledger.issue(AnswerGroup(one, ledger.run.order.at(one).problem, shipped, [1, 2], [Rollout(1)]))
    ledger.close()
    _history(run)
    _spans(run)
    _checkpoints(run)
    evaluations(run)
    _logs(run)
    for role, state in (("trainer", "done"), ("orchestrator", "done"), ("inference", "stopped")):
        run.set_role(role, state)
    return run


def _ledger_run() -> LedgerRun:
    portions = (Portion("sums", 500, 1.0, 4), Portion("words", 300, 1.0, 4))
    return LedgerRun("5eed", "branch_1", FORMAT, 0, 800, 6, 4, 1, portions)


def _answer(
    step: int, place: int, sample: int, mean: float, draw: random.Random, *, trained: bool = True,
    failed: str | None = None, reward_: float | None = -1.0,
) -> dict[str, Any]:  # fmt: skip
    right = draw.random() < mean
    reward = (1.0 if right else round(draw.random() * 0.4, 2)) if reward_ == -1.0 else reward_
    a, b = 100 + place, 7 * place % 90
    environment = _ledger_run().order.portions[_ledger_run().order.environment(place)].label
    question = f"Anna has {a} apples and Ben gives her {b}. How many has she?"
    asked = f"<|im_start|>system\n{PROGRAM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
    asked += "<|im_start|>assistant\n"
    call = f'{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}'
    call = f"<think>I add {a} and {b}.</think>\n<tool_call>{call}</tool_call><|im_end|>"
    result = f"<|im_start|>tool\n{a + b}<|im_end|>\n<|im_start|>assistant\n"
    text = f"Anna has {a + b if right else a + b + 1} apples now."
    turns = [turn(asked, call, step), turn(result, text, step)] if sample % 2 else [turn(asked, text, step)]
    cut = draw.random() < 0.06
    return rollout(
        step, place, sample, environment=environment, problem=_ledger_run().order.at(place).problem,
        prompt=asked, text=text, turns=turns, reward=reward, trained=trained, failed=failed,
        parts=[("right", float(right)), ("short", 0.25)] if reward is not None else [],
        finish_reason="length" if cut else "stop", seconds=0.5 + draw.random() * 3,
    )  # fmt: skip


def _history(run: RunDirectory) -> None:
    argv = {"argv": ["rl", "@", "my run.toml", "--ckpt"], "folder": ""}
    for event in (
        {"time": BEGAN + 95, "event": "restart", "role": "orchestrator", "step": 14,
         "reason": "died (signal 9)", "how": "is started again"},
        {"time": BEGAN + 150, "event": "change", "step": 30, "name": "optimizer.lr",
         "was": 2e-4, "now": 1e-4},
        {"time": BEGAN + 190, "event": "attempt", "number": 2, "idle": 22.0, **argv},
        {"time": BEGAN + 191, "event": "recompute", "steps": 4},
    ):  # fmt: skip
        run.history.append(event)


def _spans(run: RunDirectory) -> None:
    """What trainer, servers and environments did, and saves and pushes: of all steps but the first ten."""
    trainer, orchestrator = (Recorder(run.spans_of(role)) for role in ("trainer_rank0", "orchestrator"))
    for one in step_spans(run.metrics.rows(), run.history.rows())[10:]:
        middle = (one.work + one.end) / 2
        trainer.add(MAIN, f"waiting for batch {one.step}", one.begin, one.work, waiting=True)
        trainer.add(MAIN, f"step {one.step}, micro-batch 0", one.work, middle, waiting=False)
        trainer.add(MAIN, f"step {one.step}, micro-batch 1", middle, one.end, waiting=False)
        orchestrator.add("servers", "generating", one.begin - 1, one.work)
        orchestrator.add("environments", "rewarding", one.work - 0.7, one.work - 0.1)
        orchestrator.add("weights", "pushing weights", one.end, one.end + 0.2)
        if one.step % 10 == 1:
            trainer.add("saves", "saving", one.work, one.work + 1.2, step=one.step - 1)
    trainer.write()
    orchestrator.write()


def _checkpoints(run: RunDirectory) -> None:
    store = CheckpointStore(run.checkpoints)

    def commit(step: int, branch: str) -> None:
        store.begin(step, ["model"])
        store.write_part(step, "files", {"model/weights.bin": bytes(1000 * step)}, "run:1")
        metrics = {"loss": 0.1, "reward/mean": step / 100}
        store.commit(
            step, {"files": "run:1"}, timeout=0.0, about={**ABOUT, "branch": branch, "metrics": metrics}
        )

    for step in (10, 20, 30, 40):
        commit(step, "branch_1")
    store.set_aside_after(30, "branch_1")
    for step in (40, 50, 60):
        commit(step, "branch_2")
    with open(store.folder(20) / "model" / "weights.bin", "ab") as file:
        file.write(b"x")


def evaluations(run: RunDirectory) -> None:
    """Results of six evaluations, and the answers of the newest two."""
    for step in (10, 20, 30, 40, 50, 60):
        score = 0.3 + 0.3 * (1 - math.exp(-step / 20)) - (0.08 if step == 60 else 0)
        row = {"step": step, "name": "held_out", "run_id": "5eed", "branch": "branch_1"}
        row |= {"problems": 80, "samples": 320, "failed": 2 if step == 20 else 0}
        row |= {"reward": score, "reward_ci95": 0.06, "tokens": 40.5, "truncated": 0.031, "seconds": 12.5}
        for k, more in ((1, -0.05), (2, 0.1), (4, 0.2)):
            row |= {f"pass@{k}": score + more, f"pass@{k}_ci95": 0.06 - k / 200}
        run.evals.append(row)
    kept = KeptRollouts(run.evaluated("held_out"))
    for step, right in ((50, {3, 10}), (60, {0, 1, 2, 3})):  # of problems 0 to 4, 10 to 13, and 20
        rows = [
            rollout(step, place, sample, problem=problem, trained=False,
                    reward=None if problem == step // 10 + 7 else float(problem in right))
            for place, problem in enumerate((0, 1, 2, 3, 4, 10, 11, 12, 13, 20)) for sample in range(2)
        ]  # fmt: skip
        kept.write(step, rows, ATTEMPT, math.inf)


def _logs(run: RunDirectory) -> None:
    lines = ["2026-11-26 10:13:06,435 INFO cairn.trainer.loop: step 1 done"]
    for step in range(2, 80):
        lines.append(f"2026-11-26 10:13:{step % 60:02d},435 INFO cairn.trainer.loop: step {step} done")
    lines.append("2026-11-26 10:14:07,111 WARNING cairn.trainer.loop: validation took 12.5 s")
    (run.logs / "trainer.log").write_text("\n".join(lines) + "\n")
    trace = (
        "2026-11-26 10:13:{0:02d},000 ERROR cairn.orchestrator.environments: problem {0} fails\n"
        'Traceback (most recent call last):\n  File "my_env.py", line 23, in reward\n'
        '    return answers["anser"]\n'
        "KeyError: 'anser'\n"
    )
    (run.logs / "orchestrator.log").write_text("".join(trace.format(place) for place in range(40)))
    (run.logs / "inference.log").write_text("\x1b[32mready\x1b[0m at http://127.0.0.1:8431\n")


def hostile(path: Path) -> RunDirectory:
    """A run whose texts do what they can: markup, control characters, directions, a megabyte in one line."""
    run = make(path, "rl", "done", 4, **{f"eval/{HOSTILE}/reward": 0.5})
    long = "long " + "x" * (1 << 20)
    keep(
        run,
        1,
        [
            rollout(1, 0, 0, text=HOSTILE, prompt=f"<user>{HOSTILE}<assistant>", parts=[(HOSTILE, 1.0)]),
            rollout(1, 0, 1, text=long, reward=0.25),
            rollout(1, 0, 2, text="", reward=None, failed=f"ValueError: {HOSTILE}", trained=False),
            rollout(1, 1, 0, environment=HOSTILE, finish_reason=HOSTILE),
        ],
    )
    run.evals.append({"step": 1, "name": HOSTILE, "reward": 0.5, "reward_ci95": 0.1, "error": HOSTILE})
    (run.logs / "trainer.log").write_bytes(
        b"ERROR \xff\xfe " + HOSTILE.encode(errors="surrogatepass") + b"\n" + b"y" * (1 << 20)
    )
    texts = dict.fromkeys(("role", "reason", "how"), HOSTILE)
    run.history.append({"time": BEGAN + 9, "event": "restart", "step": 1, **texts})
    return run


def damage(run: RunDirectory) -> None:
    """Leave the files of a run as a crash and a bad disk may: cut short, torn, and of another kind."""
    with open(run.metrics.path, "ab") as file:
        file.write(b'{"step": 5, "reward/me')
    with open(run.history.path, "ab") as file:
        file.write(b"\x00\x00\xff{]\n")
    run.config.write_bytes(b'{"max_ste')
    run.rollouts.mkdir(exist_ok=True)
    (run.rollouts / "step_7.parquet").write_bytes(b"PAR1 no file at all PAR1")
    (run.rollouts / "step_8.parquet").write_bytes(b"")
    table = pa.table({"step": [9], "place": ["not a number"], "sample": [0], "reward": [{"a": 1}]})
    pq.write_table(table, run.rollouts / "step_9.parquet")
    run.ledger.write_bytes(b"SQLite format 3\x00" + b"\xff" * 5000)
    run.evals.path.write_bytes(b'{"step": "x"}\n{"step": 3, "name": null}\n\n[1]\n')
    (run.path / "checkpoints" / "step_3").mkdir(parents=True)
    (run.path / "checkpoints" / "step_3" / "manifest.json").write_text("{")


def many(path: Path, steps: int = 1000, prompts: int = 125, samples: int = 8) -> RunDirectory:
    """A run of a million rollouts, unless the numbers say otherwise; takes about a minute."""
    run = begin(path, max_steps=steps)
    draw = np.random.default_rng(0)
    words = [f"w{number:03d}{'abcdefgh'[number % 8] * (number % 5)}" for number in range(400)]
    kept = KeptRollouts(run.rollouts)
    run.rollouts.mkdir()
    lines: list[str] = []
    for step in range(1, steps + 1):
        pq.write_table(_table(step, prompts, samples, draw, words), kept.path(step), compression="zstd")
        row = {
            "step": step,
            **HEALTHY,
            "reward/mean": 0.5 + step / 4000,
            **{f"more/{i}": step / i for i in range(1, 90)},
        }
        lines.append(json.dumps(row))
    run.metrics.path.write_text("\n".join(lines) + "\n")
    run.set_role("trainer", "done")
    return run


def _table(step: int, prompts: int, samples: int, draw: np.random.Generator, words: list[str]) -> pa.Table:
    count, tokens = prompts * samples, 30
    places = np.arange((step - 1) * prompts, step * prompts)

    def lists(values: pa.Array, each: int) -> pa.ListArray:
        return pa.ListArray.from_arrays(
            pa.array(np.arange(0, count * each + 1, each, dtype=np.int32)), values
        )

    asked = [
        f"<user>problem {p}: {' '.join(words[(p * 7 + j) % 400] for j in range(24))}<assistant>"
        for p in places
    ]
    prompt = pa.array(asked).take(pa.array(np.repeat(np.arange(prompts), samples)))
    text = pa.array([" ".join(words[i] for i in row) for row in draw.integers(0, 400, (count, tokens))])
    zeros, reward = pa.array(np.zeros(count, np.int32)), draw.random(count).round(2)
    version = [
        pa.array([f"5eed:branch_1:{step - 1}"] * count),
        zeros,
        pa.array(np.full(count, tokens, np.int32)),
    ]
    versions = pa.StructArray.from_arrays(version, names=["version", "start", "end"])
    ids = pa.array(draw.integers(0, 500, count * tokens, dtype=np.int32))
    logprobs = pa.array(-draw.random(count * tokens, dtype=np.float32))
    shown = lists(pa.array(np.ones(count * 4, np.int32)), 4)
    of_turn = {
        "branch": zeros, "kept": zeros, "call": pa.nulls(count, pa.int32()), "prompt": prompt, "text": text,
        "finish_reason": pa.array(["stop"] * count), "prompt_ids": shown, "token_ids": lists(ids, tokens),
        "logprobs": lists(logprobs, tokens), "versions": lists(versions, 1),
    }  # fmt: skip
    fields = SCHEMA.field("turns").type.value_type
    turns = pa.StructArray.from_arrays([of_turn[field.name] for field in fields], fields=list(fields))
    columns = {
        "step": pa.array(np.full(count, step)), "place": pa.array(np.repeat(places, samples)),
        "sample": pa.array(np.tile(np.arange(samples, dtype=np.int32), prompts)),
        "problem": pa.array(np.repeat(places % 5000, samples)),
        "environment": pa.array(["sums"] * (count // 2) + ["words"] * (count - count // 2)),
        "trained": pa.array(np.ones(count, bool)), "policy_step": pa.array(np.full(count, step - 1)),
        "prompt": prompt, "text": text, "reward": pa.array(reward),
        "parts": pa.array([[("right", one)] for one in reward], SCHEMA.field("parts").type),
        "failed": pa.nulls(count, pa.string()), "finish_reason": pa.array(["stop"] * count),
        "tokens": pa.array(np.full(count, tokens)), "seconds": pa.array(draw.random(count) * 4),
        "diverged": zeros, "turns": lists(turns, 1),
    }  # fmt: skip
    return pa.table(columns, schema=SCHEMA)
