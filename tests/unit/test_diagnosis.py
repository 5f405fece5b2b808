"""The rules about a run's learning: recorded rows with known faults, and healthy ones without a word."""

from typing import Any

import draws
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.run.diagnosis import RULES, Diagnosis, DiskRoom, Finding, RuleInput, findings
from cairn.run.diagnosis.rule import percent

HEALTHY = {
    "loss": -0.01,
    "lr": 1e-4,
    "grad_norm": 0.3,
    "time/step": 2.0,
    "time/wait": 0.1,
    "time/server_idle": 0.2,
    "time/generate": 1.9,
    "time/reward": 0.01,
    "time/reward_queue": 0.0,
    "time/rewards": 0.3,
    "samples": 32,
    "learned_tokens": 400,
    "reward/mean": 0.4,
    "reward/min": 0.0,
    "reward/max": 1.0,
    "groups": 8,
    "groups/unlearned": 2,
    "groups/zero_spread": 2,
    "groups/all_best": 1,
    "groups/all_worst": 1,
    "groups/failed": 0,
    "rollouts/all": 32,
    "rollouts/failed": 0,
    "rollouts/retried": 0,
    "rollout/cut_off": 0.1,
}
"""A step of RL: 8 prompts, 4 answers to each."""
RECORDS = {
    "loss": 2.1,
    "lr": 1e-4,
    "grad_norm": 1.2,
    "time/step": 2.0,
    "time/wait": 0.0,
    "samples": 16,
    "learned_tokens": 900,
}
"""A step of SFT."""


def rows(count: int, base: dict[str, Any] = HEALTHY, **changed: Any) -> list[dict]:
    return [{"step": step, **base, **changed} for step in range(1, count + 1)]


def found(seen: list[dict], config: dict | None = None) -> dict[str, Finding]:
    """What is found in rows, by rule."""
    return {one.rule: one for one in findings(RULES, RuleInput(seen, config or {}, "outputs/rl"))}


def mixed(one: dict, other: dict) -> dict:
    """A row of two environments."""
    return (
        HEALTHY | {f"env/one/{k}": v for k, v in one.items()} | {f"env/two/{k}": v for k, v in other.items()}
    )


def test_healthy_rows_are_met_with_silence():
    assert found(rows(50)) == {}
    assert found(rows(50, RECORDS)) == {}
    assert found([]) == {}
    of_environment = {k: v for k, v in HEALTHY.items() if "/" in k or k == "groups"}
    assert found(rows(20, mixed(of_environment, of_environment))) == {}


@pytest.mark.parametrize(
    ("rule", "base", "changed", "says"),
    [
        (
            "no spread",
            HEALTHY,
            {"groups/unlearned": 8, "groups/all_worst": 8, "groups/all_best": 0},
            ["64 of 64 prompts taught nothing in steps 1 to 8", "64 all wrong", "too hard"],
        ),
        (
            "no spread",
            HEALTHY,
            {"groups/unlearned": 7, "groups/all_best": 6, "groups/all_worst": 1},
            ["56 of 64 prompts", "48 all right, 8 all wrong", "orchestrator.pools.easy"],
        ),
        (
            "nothing learned",
            HEALTHY,
            {"grad_norm": 0.0},
            ["8 of 8 steps taught nothing", "`rollouts"],
        ),
        ("nothing learned", RECORDS, {"grad_norm": 0.0, "learned_tokens": 0}, ["no token to learn"]),
        ("cut off", HEALTHY, {"rollout/cut_off": 0.97}, ["97 % of the answers were cut off", "(12 now)"]),
        (
            "cut samples",
            HEALTHY,
            {"cut_samples": 32, "lost_tokens": 400},
            [
                "256 of 256 rollouts in steps 1 to 8 are longer",
                "50 % of the tokens",
                "trainer.seq_len (48 now)",
            ],
        ),
        ("cut samples", RECORDS, {"cut_samples": 4, "lost_tokens": 300}, ["25 %", "data.too_long"]),
        ("unlearned records", RECORDS, {"unlearned_samples": 8}, ["50 % of the records", "data.learn"]),
        (
            "unlearned records",
            RECORDS,
            {"dropped_records": 4},
            ["20 % of the records", "dropped as too long"],
        ),
        (
            "given up",
            HEALTHY,
            {"groups/failed": 2},
            ["16 prompts (20 %) given up", "`rollouts outputs/rl --failed`"],
        ),
        ("failed answers", HEALTHY, {"rollouts/failed": 8}, ["64 of 256 answers failed"]),
        (
            "malformed calls",
            HEALTHY,
            {"rollout/malformed_calls": 0.5, "rollout/tool_calls": 0.0},
            ["100 % of the tool calls", "orchestrator.tool_parser"],
        ),
        (
            "no calls",
            HEALTHY,
            {"rollout/tool_calls": 0.0, "rollout/malformed_calls": 0},
            ["no tool was called"],
        ),
        (
            "summed scores",
            HEALTHY,
            {"reward/score/mean": 0.3, "reward/acc/mean": 0.1},
            ["the sum of score, acc: 0.4", 'weights={"acc": 0}'],
        ),
        (
            "slow rewards",
            HEALTHY,
            {
                "time/wait": 18.0,
                "time/step": 0.7,
                "time/server_idle": 17.0,
                "time/rewards": 17.2,
                "time/reward": 1.0,
                "time/reward_queue": 7.5,
            },
            ["17.2 of 18.7 s a step", "orchestrator.reward_threads (1 now)", "coroutine"],
        ),
        (
            "other pushes",
            HEALTHY,
            {"servers/foreign_weights": 2},
            ["another run pushes weights to the same server"],
        ),
        (
            "other start",
            HEALTHY,
            {"servers/start_differed": 3},
            ["into 24 parameters", "orchestrator's log names the parameters"],
        ),
    ],
)
def test_each_fault_is_found_alone_and_names_the_setting(
    rule: str, base: dict, changed: dict, says: list[str]
):
    """With its numbers, in two lines of a wide terminal."""
    config = {
        "seq_len": 64,
        "trainer": {"seq_len": 48},
        "orchestrator": {"reward_threads": 1, "sampling": {"max_tokens": 12}},
    }
    it = found(rows(8, base, **changed), config)
    assert list(it) == [rule]
    assert ("redraw" in str(it[rule])) <= ("redraw" in " ".join(says)), "only where it can help"
    for words in says:
        assert words in str(it[rule])
    assert len(str(it[rule])) < 400
    assert it[rule].level >= 1


def over(steps: int, base: dict[str, Any] = HEALTHY, **how: Any) -> list[dict]:
    """Rows in which metrics change: each is a function of the share of the steps that are done."""
    return [
        {"step": step, **base, **{name: value(step / steps) for name, value in how.items()}}
        for step in range(1, steps + 1)
    ]


def evaluated(steps: int, every: int, result: Any, **how: Any) -> list[dict]:
    """Rows that hold, as RL's do, the newest result of an evaluation and the step that it is of."""
    seen = over(steps, **how)
    for row in seen:
        if step := row["step"] // every * every:
            row |= {"eval/sums/reward": result(step / steps), "eval/sums/step": float(step)}
    return seen


@pytest.mark.parametrize(
    ("rule", "seen", "config", "says"),
    [
        (
            "entropy collapse",
            over(40, entropy=lambda done: 1.5 if done < 0.3 else 0.02),
            {},
            ["fell from 1.5 to 0.02 between steps 1 and 40", "sampling.temperature"],
        ),
        ("kl to the reference", rows(8, **{"kl/reference": 2.0}), {}, ["2 nats per token", "trainer.kl"]),
        ("clipped ratios", rows(8, **{"ratio/clipped": 0.4}), {}, ["40 % of the tokens", "optimizer.lr"]),
        (
            "mismatch with the servers",
            rows(8, **{"mismatch/logprob": 0.2}),
            {},
            ["differ by 0.2", "inference.dtype", "trainer.router_replay"],
        ),
        (
            "largest gaps",
            rows(8, **{"mismatch/logprob_max": 12.5, "mismatch/logprob": 0.004}),
            {},
            ["in half of steps 1 to 8", "differs by 12.5", "trainer.keep_tokens_gb"],
        ),
        (
            "largest gaps",
            rows(8, **{"mismatch/logprob_max": 6.0, "staleness/max": 1}),
            {},
            ["differs by 6 ", "max_off_policy_steps = 0"],
        ),
        (
            "evaluation 'sums' falls",
            evaluated(40, 8, lambda done: 0.5 if done < 0.5 else 0.3, **{"reward/mean": lambda done: done}),
            {},
            ["fell from 0.5 at step 8 to 0.3 at step 40", "ckpt.keep_best"],
        ),
        (
            "validation 'held' rises",
            over(
                8,
                RECORDS,
                loss=lambda done: 2 - done,
                **{"validation/held/loss": lambda done: 2 + (done - 0.25) ** 2},
            ),
            {},
            ["rose from 2 at step 2", "patience"],
        ),
        (
            "nothing learned",
            over(8, grad_norm=lambda done: 0.3 if done < 0.4 else 0.0),
            {},
            ["5 of 8 steps taught nothing", "orchestrator.redraw"],
        ),
        (
            "the trainer waits",
            rows(8, **{"time/wait": 3.0, "time/step": 1.9}),
            {"orchestrator": {"max_off_policy_steps": 1}},
            ["the trainer waits 61 % of the time for rollouts", "Add servers", "(1 now)"],
        ),
        ("the trainer waits", rows(8, RECORDS, **{"time/wait": 1.5}), {}, ["43 % of the time for records"]),
        (
            "the servers wait",
            rows(8, **{"time/server_idle": 1.4}),
            {"orchestrator": {"max_off_policy_steps": 1}},
            ["nothing to do for 67 % of the time", "trainer.workers"],
        ),
        (
            "stale answers",
            rows(8, **{"groups/dropped": 2}),
            {"orchestrator": {"max_off_policy_steps": 2}},
            ["16 of 80 prompts were dropped", "(2 now)"],
        ),
        (
            "restarts",
            over(8, **{"run/restarts": lambda done: 8 * done, "run/restarts/trainer": lambda done: 8 * done}),
            {},
            ["trainer 8 times", "outputs/rl/history.jsonl"],
        ),
        (
            "idle ranks",
            rows(8, busy_ranks=0.5),
            {},
            ["each rank waits 50 % of a step for others", "micro_batch_tokens"],
        ),
        (
            "slow saves",
            over(8, **{"time/save": lambda done: 3.0, "time/save_stall": lambda done: 0.4}),
            {},
            ["stood still for saves during 16 % of the time", "0.4 s at most, and 3 s", "ckpt.interval"],
        ),
    ],
)
def test_where_training_leads_and_where_the_time_goes(
    rule: str, seen: list[dict], config: dict, says: list[str]
):
    it = found(seen, config)
    assert list(it) == [rule]
    for words in says:
        assert words in str(it[rule])
    assert len(str(it[rule])) < 400


def test_a_policy_that_has_learned_its_task_may_be_sure_of_it():
    """The entropy falls because nearly every answer is right."""
    learned = over(
        40, entropy=lambda done: 1.5 - 1.49 * done, **{"reward/mean": lambda done: 0.1 + 0.8 * done}
    )
    assert found(learned) == {}


def test_gaps_that_rounding_makes_are_none_and_neither_is_one_odd_answer():
    """In float32 and bfloat16, and a policy that has learned something since its answers were sampled."""
    for largest, mean in ((8e-5, 4.5e-7), (0.9, 7.5e-3), (3.0, 0.05)):
        assert found(rows(8, **{"mismatch/logprob_max": largest, "mismatch/logprob": mean})) == {}
    odd = over(8, **{"mismatch/logprob_max": lambda done: 14.0 if done > 0.7 else 0.4})
    assert found(odd) == {}
    assert found(rows(3, **{"mismatch/logprob_max": 14.0})) == {}


def test_taking_turns_is_no_wait_that_anybody_could_end():
    """With max_off_policy_steps = 0 the trainer waits while servers generate, and the other way round."""
    turns = rows(8, **{"time/wait": 3.0, "time/server_idle": 2.0})
    assert found(turns, {"orchestrator": {"max_off_policy_steps": 0}}) == {}


def test_results_that_only_vary_are_no_fall():
    noise = evaluated(
        40, 4, lambda done: 0.5 + 0.04 * (-1) ** round(done * 10), **{"reward/mean": lambda done: done}
    )
    assert found(noise) == {}
    wobbles = {"validation/held/loss": lambda done: 2.0 + 0.1 * (-1) ** round(done * 8)}
    assert found(over(8, RECORDS, loss=lambda done: 2 - done, **wobbles)) == {}


@pytest.mark.parametrize(
    ("free", "config", "says"),
    [
        (25, {"max_steps": 100, "ckpt": {"interval": 10}}, "room for 2 of the 9 checkpoints to come"),
        (5, {"max_steps": 100, "ckpt": {"interval": 10, "keep_last": 2}}, "no room for another checkpoint"),
        (25, {"max_steps": 100, "ckpt": {"interval": 10, "keep_last": 2}}, None),
        (95, {"max_steps": 100, "ckpt": {"interval": 10}}, None),
        (5, {"max_steps": 10, "ckpt": {"interval": 10}}, None),
        (5, {"max_steps": 100}, None),
    ],
)
def test_a_disk_that_fills_is_noticed_before_it_is_full(free: int, config: dict, says: str | None):
    seen = RuleInput(rows(10), config, "outputs/rl", DiskRoom(free * 10**9, 10 * 10**9))
    texts = [str(one) for one in findings(RULES, seen)]
    assert (says is None) == (not texts)
    if says:
        assert says in texts[0]
        assert "`ckpt prune outputs/rl`" in texts[0]


def test_a_fault_of_one_environment_is_not_hidden_by_the_others():
    """The metrics of the whole batch look fair."""
    fine = {
        "groups": 4,
        "groups/unlearned": 0,
        "rollout/cut_off": 0.0,
        "rollouts/all": 16,
        "reward/mean": 0.2,
    }
    flat = fine | {"groups/unlearned": 4, "rollout/cut_off": 1.0}
    it = found(rows(4, mixed(fine, flat), **{"groups/unlearned": 4}))
    assert set(it) == {"no spread of environment 'two'", "cut off of environment 'two'"}
    assert "16 of 16 prompts of environment 'two' taught nothing" in str(it["no spread of environment 'two'"])


def test_functions_from_trl_get_the_hint_that_fits_them():
    """All groups flat, and rewards that are functions of a data set: they may compare answers."""
    flat = rows(2, **{"groups": 6, "groups/unlearned": 6, "groups/all_worst": 3, "groups/all_best": 3})
    config = {"orchestrator": {"environment": {"args": {"rewards": ["mine:ranked"]}}}}
    assert "group = true" in str(found(flat, config)["no spread"])
    assert "group = true" not in str(found(flat)["no spread"])


def test_rewards_whose_parts_are_weighted_are_no_sum_of_scores():
    parts = {"reward/score/mean": 0.4, "reward/acc/mean": 0.9}
    assert found(rows(2, **parts)) == {}, "acc counts 0"
    assert found(rows(2, **{"reward/right/mean": 0.3, "reward/short/mean": 0.1})) == {}, "no score"
    assert found(rows(2, **{"reward/score/mean": 0.4})) == {}, "score alone"


def test_a_thing_is_said_once_and_again_only_when_it_gets_clearly_worse():
    said: list[tuple[int, int]] = []
    diagnosis, seen = Diagnosis(RULES), list[dict]()
    for step in range(1, 41):
        unlearned = 0 if step <= 10 else 7 if step <= 25 else 8
        seen.append({"step": step, **HEALTHY, "groups/unlearned": unlearned})
        said += [(step, one.level) for one in diagnosis.news(RuleInput(seen))]
    assert len(said) == 2
    assert [level for _, level in said] == [1, 2]
    assert 10 < said[0][0] <= 25 < said[1][0]


def test_at_the_end_the_numbers_are_those_of_all_steps():
    """What has passed is no matter any more."""
    diagnosis, seen = Diagnosis(RULES), rows(4, **{"rollout/cut_off": 1.0})
    assert [one.rule for one in diagnosis.news(RuleInput(seen))] == ["cut off"]
    seen += [{"step": step, **HEALTHY} for step in range(5, 40)]
    assert diagnosis.news(RuleInput(seen)) == diagnosis.outcome(RuleInput(seen)) == []
    seen = rows(20)
    seen[4]["grad_norm"] = seen[8]["grad_norm"] = 0.0
    (outcome,) = Diagnosis(RULES).outcome(RuleInput(seen))
    assert outcome.what == "2 of 20 steps taught nothing: their gradient is 0"


def test_updates_that_the_guard_refused_are_no_steps_without_gradient():
    assert found(rows(8, grad_norm=0.0, skipped_updates=1)) == {}


def test_the_first_step_waits_for_the_start_and_not_for_rewards():
    slow = rows(1, **{"time/wait": 60.0, "time/server_idle": 60.0, "time/rewards": 60.0})
    assert found(slow) == {}


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0 %"), (0.004, "0.4 %"), (0.5, "50 %"), (0.999, "99 %"), (1, "100 %")]
)
def test_shares_in_words(share: float, text: str):
    assert percent(share) == text


NUMBERS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True), st.integers(-5, 10**6), st.none(), st.text(max_size=3)
)
NAMES = st.sampled_from([*HEALTHY, *RECORDS, "cut_samples", "lost_tokens", "dropped_records", "env/a/groups",
    "env/a/groups/unlearned", "env/a/rollout/cut_off", "env/a/reward/score/mean", "env/a/reward/acc/mean",
    "env/a/reward/mean", "reward/score/mean", "rollout/malformed_calls", "rollout/tool_calls",
    "servers/foreign_weights", "servers/start_differed", "entropy", "kl/reference", "ratio/clipped",
    "mismatch/logprob",
    "mismatch/logprob_max", "staleness/max", "eval/a/reward",
    "eval/a/step", "validation/a/loss", "groups/dropped", "run/restarts", "run/restarts/trainer",
    "run/goodput",
    "time/save", "time/save_stall"])  # fmt: skip


@draws.seldom
@settings(deadline=None, max_examples=200)
@given(st.lists(st.dictionaries(NAMES, NUMBERS, max_size=12), max_size=20))
def test_no_row_of_any_content_breaks_a_rule(contents: list[dict]):
    """A run of an older version, or whose file was damaged, is looked at like others."""
    seen = [{**row, "step": step} for step, row in enumerate(contents, 1)]
    for finding in findings(RULES, RuleInput(seen)):
        assert finding.level >= 1
        assert finding.what
        assert finding.advice
