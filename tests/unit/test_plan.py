"""The table of steps by which commands make their plan."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cairn.config.cli import COMMANDS
from cairn.config.rl import RLConfig
from cairn.config.trainer import SFTConfig
from cairn.launch.plan.run_plan import Draft, PlanStep, again, make
from cairn.launch.plan.steps import STEPS
from cairn.policy.errors import ServerUnavailable
from cairn.run.errors import UsageError

SFT, RL = frozenset({"sft"}), frozenset({"rl"})
FIELDS = frozenset(Draft.__dataclass_fields__)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_step_comes_after_those_that_give_what_it_needs(command: str):
    known: set[str] = set()
    for step in (step for step in STEPS if command in step.commands):
        assert known.issuperset(step.needs), step.name
        known.update(step.gives)


def test_rows_name_fields_of_the_draft_and_commands_that_there_are():
    for step in STEPS:
        assert FIELDS.issuperset((*step.needs, *step.gives)), step.name
        assert set(COMMANDS).issuperset(step.commands), step.name
        assert {"disk", "network"}.issuperset(step.touches), step.name
    assert len({step.name for step in STEPS}) == len(STEPS)


def gives(name: str, value: Any, seen: list[str]) -> Callable[[Draft], Draft]:
    def work(draft: Draft) -> Draft:
        seen.append(name)
        return draft.having(**{name: value})

    return work


def test_a_plan_that_is_made_again_repeats_what_depends_on_what_has_changed():
    seen: list[str] = []
    table = [
        PlanStep("first", gives("roles", ("trainer",), seen), SFT, gives=("roles",)),
        PlanStep("start", gives("start", None, seen), SFT, gives=("start",)),
        PlanStep("model", gives("model", "folder", seen), SFT, needs=("start",), gives=("model", "config")),
        PlanStep("choices", gives("choices", (), seen), SFT, needs=("roles",), gives=("choices",)),
        PlanStep("recipe", gives("recipe", {"a": 1}, seen), SFT, needs=("model",), gives=("recipe",)),
        PlanStep("others", gives("attempt", None, seen), frozenset({"rl"}), needs=("start",)),
    ]
    plan = make("sft", SFTConfig(), table)
    assert seen == ["roles", "start", "model", "choices", "recipe"]
    assert (plan.roles, plan.model, plan.recipe) == (("trainer",), "folder", {"a": 1})
    seen.clear()
    config = SFTConfig(max_steps=7)
    second = again(plan, "start", table, config=config)
    assert seen == ["start", "model", "recipe"]
    assert (second.config, second.roles) == (config, ("trainer",))
    assert plan.config == SFTConfig(), "the plan before stays as it was"


def test_a_server_of_its_own_stays_one_when_its_address_is_in_the_settings():
    by_name = {step.name: step for step in STEPS}
    rows = [by_name[name] for name in ("own server", "the servers at --orchestrator.inference-url")]
    table = [PlanStep("settled", gives("settled", None, []), RL, gives=("settled",)), *rows]
    plan = make("rl", RLConfig(), table)
    assert plan.config.orchestrator.inference_url == ["http://127.0.0.1:8000"]
    given = RLConfig.model_validate({"orchestrator": {"inference_url": ["http://127.0.0.1:1"]}})
    with pytest.raises(ServerUnavailable):
        make("rl", given, table)


def test_a_complete_run_ends_its_plan():
    seen: list[str] = []
    table = [
        PlanStep("complete", gives("complete", "it is done", seen), SFT, gives=("complete",)),
        PlanStep("model", gives("model", "folder", seen), SFT, gives=("model",)),
    ]
    assert make("sft", SFTConfig(), table).complete == "it is done"
    assert seen == ["complete"]


def test_a_dry_run_touches_nothing_and_finds_all_that_is_wrong():
    seen: list[str] = []

    def refuses(_draft: Draft) -> Draft:
        raise UsageError("it is wrong")

    def says(draft: Draft) -> Draft:
        print("what a step prints")
        return draft

    table = [
        PlanStep("writes", gives("model", "folder", seen), SFT, gives=("model",), touches=("disk",)),
        PlanStep(
            "asks", gives("taken", {}, seen), SFT, touches=("network",), dry=gives("taken", {"a": "b"}, seen)
        ),
        PlanStep("needs it", gives("recipe", {}, seen), SFT, needs=("model",)),
        PlanStep("refuses", refuses, SFT, gives=("checked",)),
        PlanStep("says", says, SFT),
        PlanStep("is not asked", refuses, SFT, when=lambda _draft: False, gives=("roles",)),
        PlanStep("goes on", gives("roles", ("trainer",), seen), SFT, needs=("roles",)),
    ]
    draft = make("sft", SFTConfig(dry_run=True), table)
    assert seen == ["taken", "roles"]
    assert draft.left_out == ("writes",)
    assert draft.errors == ("it is wrong",)
    assert draft.found == ("what a step prints",)
    # Without settings there is nothing to show.
    with pytest.raises(UsageError, match="it is wrong"):
        make("sft", SFTConfig(dry_run=True), [PlanStep("settings", refuses, SFT, gives=("config",))])


def test_a_dry_run_finds_what_a_checkpoint_has_against_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from cairn.launch import main

    run = tmp_path / "run"
    command = ["sft", "--dry-run", "--output-dir", str(run), "--ckpt.resume-step", "4"]
    monkeypatch.setattr("sys.argv", command)
    assert main.sft() == 2
    printed = capsys.readouterr()
    assert SFTConfig.model_validate_json(printed.out).ckpt is not None
    assert "error: --ckpt.resume-step 4: no such checkpoint in" in printed.err
    assert not run.exists()
    monkeypatch.setattr("sys.argv", [*command[:-2], "--ckpt.remote", "s3://bucket/run"])
    assert main.sft() == 0
    assert "\na dry run leaves out: the object store, and with it what the run resumes from" in (
        capsys.readouterr().err
    )
