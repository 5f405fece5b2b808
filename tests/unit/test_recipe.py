"""A run goes on with the recipe that it was made with; what differs is said, accepted or refused."""

import dataclasses
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from pydantic import BaseModel
from runs import ABOUT
from transformers import AutoTokenizer

from cairn.checkpoint.eval_metrics import ratings_in
from cairn.checkpoint.manifest import Manifest
from cairn.checkpoint.retention import EARLIER_BEST, reasons_to_keep
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tiers import SavedStep
from cairn.config.ckpt import CkptConfig
from cairn.config.environment import MixedEnvironmentConfig
from cairn.config.kinds import KINDS
from cairn.config.model import ModelConfig
from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig
from cairn.config.preferences import DPOConfig, RewardConfig
from cairn.config.rl import RLConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.config.trainer import SFTConfig, SFTDataConfig
from cairn.launch.attempt import begin
from cairn.launch.plan.recipe import finish_recipe, join_recipe, plan_recipe
from cairn.launch.plan.settings import with_steps
from cairn.launch.start import Start
from cairn.orchestrator import environment_identity as identity
from cairn.orchestrator.environment_identity import changes_since, orchestrator_recipe, same_environment
from cairn.orchestrator.environments import ReverseText
from cairn.run.changes import Change, Settings, in_words, measured_anew
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.files import make_folders, read_json, write_json
from cairn.run.messages import Attempt
from cairn.run.recipe import OF_ANY_ROLE, ORCHESTRATOR, TRAINER, Compared, settings_of, template_arguments
from cairn.trainer.data.rendering import Encoder
from cairn.trainer.tasks.validation import forget_outdated

MODEL = Path(__file__).resolve().parents[2] / "configs" / "reverse_text" / "model"
STEP, BATCH = 5, 4


@pytest.fixture(autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that are not the user's."""
    folder = tmp_path_factory.mktemp("caches")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


def write_records(path: Path, count: int, changed: int | None = None) -> Path:
    """Text records, of which one may be another."""
    records = [{"prompt": f"{i}", "completion": "y" if i == changed else "x"} for i in range(count)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def sft(tmp_path: Path, data: Path, *, accept: tuple[str, ...] = (), **settings: Any) -> SFTConfig:
    """The configuration of an SFT run with `data`."""
    return SFTConfig(
        model=ModelConfig(name=str(tmp_path / "model")),
        data=SFTDataConfig(name=str(data), batch_size=settings.pop("batch_size", BATCH)),
        ckpt=CkptConfig(resume_step=STEP, accept_changes=list(accept)),
        **settings,
    )


def start_at(tmp_path: Path, recipe: dict | None, **parts: Any) -> Start:
    """A checkpoint after `STEP` steps with that recipe; `parts` are what else its state files hold."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    folder = store.folder(STEP)
    shutil.copytree(MODEL, folder / "model", dirs_exist_ok=True)
    shutil.copytree(MODEL, tmp_path / "model", dirs_exist_ok=True)
    progress = {"step": STEP, "total_tokens": 100, "total_samples": STEP * BATCH}
    state = {"progress": progress, "seed": 0, **parts.get("trainer", {})}
    for part in ("trainer", "orchestrator"):
        (folder / part).mkdir(exist_ok=True)
    write_json(folder / "trainer" / "state.json", state | ({"recipe": recipe["trainer"]} if recipe else {}))
    of_orchestrator = {"recipe": recipe["orchestrator"]} if recipe and "orchestrator" in recipe else {}
    write_json(folder / "orchestrator" / "state.json", of_orchestrator | parts.get("orchestrator", {}))
    manifest = Manifest(**ABOUT, step=STEP, created="", files={})
    return Start(store, folder, manifest)


FRESH = Start(CheckpointStore(Path("/nowhere")), None, None)
SFT_RUN = KINDS["sft"]


CONFIGS: dict[type[BaseModel], Compared] = {
    SFTConfig: TRAINER,
    DPOConfig: TRAINER,
    RewardConfig: TRAINER,
    TrainerConfig: TRAINER,
    OrchestratorConfig: ORCHESTRATOR,
}
ON: dict[type[BaseModel], dict[str, Any]] = {
    SFTConfig: {
        "lora": {},
        "validation": [{"name": "held", "data": {"name": "a.jsonl"}}],
        "loss": {"type": "a:B", "args": {"x": 1}},
        "optimizer": {"type": "a:B", "args": {"x": 1}},
        "scheduler": {"type": "linear", "steps": 90},
        "data": {"name": "a.jsonl"},
        "ckpt": {"interval": 5},
        "spike": {"on_spike": "rewind"},
        "wandb": {},
    },
    DPOConfig: {"scheduler": {"type": "linear", "steps": 90}},
    RewardConfig: {"scheduler": {"type": "linear", "steps": 90}},
    TrainerConfig: {
        "scheduler": {"type": "linear", "steps": 90},
        "kl": {"reference": "start", "coef": 0.1},
        "distill": {"teacher": "start"},
        "critic": {"scheduler": {"type": "cosine", "steps": 90}},
        "lora": {},
    },
    OrchestratorConfig: {
        "environment": {"name": "own:Env", "args": {"problems": 3}},
        "eval": [{"name": "test", "environment": {"args": {"problems": 3}}}],
    },
}
"""Values with which sections are there that are off, or empty, by default."""


def whole(cls: type[BaseModel]) -> dict[str, Any]:
    """A dumped configuration with all of its sections."""
    return cls(**ON.get(cls, {})).model_dump()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the single values in a dumped configuration are."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [place for key, one in inner for place in places(one, (*path, key))]
    yield from found or [path]


def otherwise(dumped: dict[str, Any], place: tuple[Any, ...]) -> dict[str, Any]:
    """The configuration with another value there."""
    changed = json.loads(json.dumps(dumped, default=str))
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    value = inner[place[-1]]
    inner[place[-1]] = (not value) if isinstance(value, bool) else f"{value} otherwise"
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("cls", CONFIGS)
def test_every_value_of_the_configuration_is_compared_or_free_by_the_list(cls: type[BaseModel]):
    """One at a time: also that of a field which is added tomorrow."""
    compared, dumped = CONFIGS[cls], whole(cls)
    before = Settings.of({"settings": settings_of(dumped, compared), "free": sorted(compared.free)})
    assert not before.changes(settings_of(dumped, compared), compared, {})
    seen: set[str] = set()
    for place in places(dumped):
        name = re.sub(r"\.\d+", "", ".".join(map(str, place)))
        changes = before.changes(settings_of(otherwise(dumped, place), compared), compared, {})
        if name not in compared:
            assert not changes, name
            continue
        assert changes, name
        assert all(in_words(change) for change in changes)
        seen.add(name)
    assert len(seen) > 10


def test_what_is_free_exists():
    """So that the list of what may differ has nothing that was renamed, and would be compared unseen."""
    for compared in (TRAINER, ORCHESTRATOR):
        known: set[str] = set()
        for cls in CONFIGS:
            if CONFIGS[cls] is compared:
                for place in places(whole(cls)):
                    parts = [str(part) for part in place if not isinstance(part, int)]
                    known |= {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
                known |= set(cls.model_fields)
        unknown = {name for name in (*compared.free, *compared.but, *compared.consent) if name not in known}
        assert unknown <= {*OF_ANY_ROLE, "environment.code"}, unknown


def test_each_environments_settings_are_all_compared():
    """Those that one of several may have for itself."""
    of_one = {"args": {"problems": 3}, "label": "one", "sampling": {"max_tokens": 9}, "samples_per_prompt": 4}
    of_one |= {"advantage": {}, "overlong": {}, "pools": {}}
    environments = [MixedEnvironmentConfig(**of_one), MixedEnvironmentConfig(label="two")]
    config = OrchestratorConfig(environments=environments)
    made = [ReverseText(**one.args) for one in environments]
    part = orchestrator_recipe(config, *made)["environments"]["one"]
    names = {name.split(".")[0] for name in part}
    assert set(MixedEnvironmentConfig.model_fields) - {"name", "args", "label", "weight"} <= names
    assert "environment.args" in part, "and the weight is in the identity of all"


@pytest.mark.parametrize("section", ["kl", "distill", "critic", "lora"])
def test_a_section_that_is_turned_on_or_off_is_one_change(section: str):
    """Also in a recipe of before, if it knew the section."""
    off = settings_of(TrainerConfig().model_dump(), TRAINER)
    on = settings_of(TrainerConfig(**{section: ON[TrainerConfig][section]}).model_dump(), TRAINER)
    for free in ({"free": sorted(TRAINER.free)}, {}):
        (turned_on,) = Settings.of({"settings": off, **free}).changes(on, TRAINER, off)
        (turned_off,) = Settings.of({"settings": on, **free}).changes(off, TRAINER, off)
        assert (turned_on.name, turned_on.was, turned_off.now) == (section, None, None)
        assert turned_on.now == turned_off.was != {}
        assert in_words(turned_on, "--trainer.").startswith(f"--trainer.{section}: off -> {{")
        assert in_words(turned_off).endswith("-> off")


def test_distillation_that_is_turned_on_is_printed_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """What a new user has met: the learning rate was printed alone."""
    start = start_at(tmp_path, plan_rl(rl(tmp_path), FRESH))
    changed = rl(tmp_path).model_copy(
        update={"trainer": TrainerConfig(distill={"teacher": "start"}, optimizer={"lr": 1e-3})}
    )
    changes = plan_rl(changed, start)["trainer"]["changes"]
    assert sorted(one["name"] for one in changes) == ["distill", "optimizer.lr"]
    printed = capsys.readouterr().out
    assert '  --trainer.distill: off -> {"teacher": "start", "coef": 1.0}\n' in printed


def test_a_checkpoint_of_before_resumes_without_false_alarm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Its recipe has fewer names, and does not say that it has all; what is not known is said to be so."""
    data, held = write_records(tmp_path / "a.jsonl", 50), write_records(tmp_path / "held.jsonl", 5)
    validation = [{"name": "held", "data": {"name": str(held)}, "interval": 7}]
    config = sft(tmp_path, data, validation=validation)
    recipe = plan_recipe(SFT_RUN, config, FRESH)
    del recipe["trainer"]["free"], recipe["trainer"]["validations"]
    settings = recipe["trainer"]["settings"]
    recipe["trainer"]["settings"] = {n: v for n, v in settings.items() if not n.startswith("validation")}
    start = start_at(tmp_path, recipe)
    again = plan_recipe(SFT_RUN, config, start)
    assert again["trainer"]["changes"] == []
    printed = capsys.readouterr().out
    assert "kept no record of validation[held]: whether these are as before" in printed
    assert "differences" not in printed
    plain = plan_recipe(SFT_RUN, sft(tmp_path, data), start)
    assert (plain["trainer"]["changes"], capsys.readouterr().out) == ([], "")
    with pytest.raises(UsageError, match=r"--data.batch-size: 4 -> 8"):
        plan_recipe(SFT_RUN, sft(tmp_path, data, batch_size=8), start)


def test_a_setting_that_did_not_exist_yet_had_its_default():
    """So a recipe that has all settings of its time says that a new one was changed."""
    saved = {"free": ["a"], "settings": {"b": 1}}
    everything = Compared(frozenset({"a"}))
    changes = Settings.of(saved).changes({"b": 1, "new": 2}, everything, {"new": 1})
    assert changes == [Change("new", 1, 2)]
    assert not Settings.of(saved).changes({"b": 1, "new": 1}, everything, {"new": 1})
    was_free = Settings.of({"free": ["a", "new"], "settings": {"b": 1}})
    assert not was_free.changes({"b": 1, "new": 2}, everything, {"new": 1})
    assert was_free.unknown({"b": 1, "new": 2}, {"new": 1}) == ["new"]


def test_exchanged_validations_are_said_and_measured_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Other records under the same name; a copy of the file is the same."""
    data = write_records(tmp_path / "a.jsonl", 50)
    held = [write_records(tmp_path / f"held{i}.jsonl", 5, changed=i) for i in range(2)]
    copy = Path(shutil.copy(held[0], tmp_path / "copy.jsonl"))

    def config(file: Path, **more: Any) -> SFTConfig:
        return sft(tmp_path, data, validation=[{"name": "held", "data": {"name": str(file)}, **more}])

    start = start_at(tmp_path, plan_recipe(SFT_RUN, config(held[0]), FRESH))
    assert plan_recipe(SFT_RUN, config(copy), start)["trainer"]["changes"] == []
    recipe = plan_recipe(SFT_RUN, config(held[1]), start)["trainer"]
    (change,) = recipe["changes"]
    assert (change["name"], change["step"]) == ("validation[held].data", STEP)
    printed = capsys.readouterr().out
    assert re.search(r"  validation\[held\]\.data: 5 records \(\w{12}\) -> 5 records \(\w{12}\)\n", printed)
    assert f"  validation/held/: its numbers up to step {STEP} are not compared with later ones" in printed
    (only,) = plan_recipe(SFT_RUN, config(held[0], records=3), start)["trainer"]["changes"]
    assert only["name"] == "validation[held].records"
    (gone,) = plan_recipe(SFT_RUN, sft(tmp_path, data), start)["trainer"]["changes"]
    assert (gone["name"], gone["now"]) == ("validation[held]", None)

    best = {"held": {"loss": 1.0, "step": STEP, "since": 3}, "other": {"loss": 2.0, "step": 1, "since": 0}}
    forget_outdated(best, recipe)
    assert list(best) == ["other"]
    later = {"held": {"loss": 9.0, "step": STEP + 1, "since": 0}}
    forget_outdated(later, recipe)
    assert list(later) == ["held"]


def test_the_best_step_is_not_chosen_by_other_records(tmp_path: Path):
    """The best by A is not deleted in favour of a number by B, nor the other way round."""
    changes = [{"step": STEP, "name": "validation[held].data", "was": {}, "now": {}, "accepted": False}]
    start = start_at(tmp_path, {"trainer": {"settings": {}, "changes": changes}})
    (start.store.folder(STEP) / "manifest.json").touch()
    rated = ratings_in(start.store.root)
    rules = CkptConfig(keep_best=1, metric="validation/held/loss", mode="min")
    numbers = {3: 0.1, 4: 0.2, STEP: 0.3, 6: 9.0, 7: 8.0, 8: 10.0}
    steps = [SavedStep(step, {"validation/held/loss": loss}, rated) for step, loss in numbers.items()]
    kept = {step: reasons for step, reasons in reasons_to_keep(steps, rules, set()).items() if reasons}
    assert kept == {3: [EARLIER_BEST], 7: ["best"], 8: ["newest"]}
    other = rules.model_copy(update={"metric": "validation/more/loss"})
    steps = [SavedStep(step, {"validation/more/loss": loss}, rated) for step, loss in numbers.items()]
    assert reasons_to_keep(steps, other, set())[3] == ["best"]


def test_another_evaluation_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Its settings, and its problems under the same settings; an agent's secrets are in no recipe."""

    def plan(start: Start, seed: int = 1, **more: Any) -> dict:
        config = rl(tmp_path, eval=[{"name": "test", **more}])
        made = ReverseText(**config.orchestrator.environment.args)
        measured = {"test": ReverseText(20, seed=seed)}
        part = orchestrator_recipe(config.orchestrator, made, evaluated=measured)
        return plan_recipe(KINDS["rl"], config, start, part)

    start = start_at(tmp_path, plan(FRESH))
    assert plan(start)["trainer"]["changes"] == []
    (change,) = plan(start, seed=2)["trainer"]["changes"]
    assert change["name"] == "eval[test].environment"
    assert measured_anew([change]) == {"eval/test/": [STEP]}
    assert "  orchestrator.eval[test].environment: 20 problems (" in capsys.readouterr().out
    (change,) = plan(start, samples=4)["trainer"]["changes"]
    assert (change["name"], change["was"], change["now"]) == ("eval[test].samples", 1, 4)
    (change,) = plan(start, interval=4)["trainer"]["changes"]
    assert not measured_anew([change])
    secret = {"environment": {"name": "agent", "args": {"env": {"KEY": "secret"}}}}
    assert "secret" not in json.dumps(plan(FRESH, **secret))


def test_the_same_recipe_goes_on_without_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Also from a copy of the file, and with more steps where the schedule has its own end."""
    data = write_records(tmp_path / "a.jsonl", 50)
    recipe = plan_recipe(SFT_RUN, sft(tmp_path, data), FRESH)
    copy = shutil.copy(data, tmp_path / "copy.jsonl")
    recipe["trainer"]["settings"]["keep_gathered"] = None  # as in steps of before it was free
    other = sft(tmp_path, Path(copy), max_steps=200).model_copy(update={"keep_gathered": True})
    again = plan_recipe(SFT_RUN, other, start_at(tmp_path, recipe))
    assert again["trainer"]["changes"] == []
    assert again["trainer"]["data"]["begins_at"] == 0
    assert capsys.readouterr().out == ""


REFUSED: dict[str, tuple[str, Callable[[Path, Path], dict], str]] = {
    "another record in the middle": (
        "data",
        lambda path, data: {"data": write_records(path / "other.jsonl", 50, changed=25)},
        r"--data.name: 50 records \(\w{12}\) -> 50 records \(\w{12}\)",
    ),
    "fewer records": (
        "data",
        lambda path, data: {"data": write_records(path / "other.jsonl", 40)},
        r"--data.name: 50 records \(\w{12}\) -> 40 records",
    ),
    "another batch size": ("batch_size", lambda path, data: {"batch_size": 8}, "--data.batch-size: 4 -> 8"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_breaks_a_promise_takes_consent(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str):
    """With which it is printed, and kept in all later checkpoints."""
    name, change, words = REFUSED[what]
    data = write_records(tmp_path / "a.jsonl", 50)
    start = start_at(tmp_path, plan_recipe(SFT_RUN, sft(tmp_path, data), FRESH))
    other = {"data": data, **change(tmp_path, data)}
    with pytest.raises(UsageError, match=words) as error:
        plan_recipe(SFT_RUN, sft(tmp_path, **other), start)
    assert f"--ckpt.accept-changes {name}" in str(error.value)
    assert str(start.folder) in str(error.value)

    recipe = plan_recipe(SFT_RUN, sft(tmp_path, **other, accept=(name,)), start)
    assert "(accepted)" in capsys.readouterr().out
    (noted,) = recipe["trainer"]["changes"]
    assert (noted["step"], noted["accepted"]) == (STEP, True)
    assert noted["name"].split(".")[-1] == name
    later = plan_recipe(SFT_RUN, sft(tmp_path, **other), start_at(tmp_path, recipe))
    assert later["trainer"]["changes"] == [noted], "it needs no consent again, and is not forgotten"
    if name == "data":
        begins_at = 0 if "in the middle" in what else STEP * BATCH
        assert later["trainer"]["data"]["begins_at"] == begins_at, (
            "another data set begins at its beginning; one that was mended keeps its place"
        )


def test_other_data_sets_are_named_by_the_field_that_has_them(tmp_path: Path):
    """Of several, that is no flag; `now` decides, since it is what the user can change."""
    one = write_records(tmp_path / "a.jsonl", 50)
    sets = {"sets": [{"name": str(write_records(tmp_path / f"{n}.jsonl", n))} for n in (20, 30)]}

    def config(data: dict) -> SFTConfig:
        whole = sft(tmp_path, one).model_dump()
        return SFTConfig(**{**whole, "data": {"batch_size": BATCH, **data}})

    for now, before, words in (
        (sets, {"name": str(one)}, r"\n  data\.sets: 50 records .* -> 20 x 1: 20 records"),
        ({"name": str(one)}, sets, r"\n  --data\.name: 20 x 1: 20 records .* -> 50 records"),
    ):
        start = start_at(tmp_path, plan_recipe(SFT_RUN, config(before), FRESH))
        with pytest.raises(UsageError, match=words):
            plan_recipe(SFT_RUN, config(now), start)


def test_other_data_at_the_end_of_an_epoch_needs_no_consent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = write_records(tmp_path / "a.jsonl", STEP * BATCH // 2)
    start = start_at(tmp_path, plan_recipe(SFT_RUN, sft(tmp_path, data), FRESH))
    other = write_records(tmp_path / "b.jsonl", 30)
    recipe = plan_recipe(SFT_RUN, sft(tmp_path, other), start)
    assert [change["name"] for change in recipe["trainer"]["changes"]] == ["data"]
    assert "--data.name: 10 records" in capsys.readouterr().out


def test_what_may_change_is_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The learning rate, for one; and where a schedule ends if that is --max-steps."""
    data = write_records(tmp_path / "a.jsonl", 50)
    linear = {"scheduler": {"type": "linear"}, "seq_len": 64}
    start = start_at(tmp_path, plan_recipe(SFT_RUN, sft(tmp_path, data, max_steps=10, **linear), FRESH))
    changed = sft(tmp_path, data, max_steps=20, optimizer={"lr": 0.5}, **linear)
    recipe = plan_recipe(SFT_RUN, changed, start)
    printed = capsys.readouterr().out
    assert "  --optimizer.lr: 1e-05 -> 0.5\n" in printed
    assert "  --scheduler.steps: 10 -> 20\n" in printed
    names = [(change["name"], change["accepted"]) for change in recipe["trainer"]["changes"]]
    assert sorted(names) == [("optimizer.lr", False), ("scheduler.steps", False)]


def test_another_loss_takes_consent(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = write_records(tmp_path / "a.jsonl", 50)
    start = start_at(tmp_path, plan_recipe(SFT_RUN, sft(tmp_path, data), FRESH))
    own = {"loss": {"type": "my_loss:Own"}}
    with pytest.raises(UsageError, match=r"(?s)--loss\.type.*--ckpt\.accept-changes loss"):
        plan_recipe(SFT_RUN, sft(tmp_path, data, **own), start)
    changed = sft(tmp_path, data, accept=("loss",), **own)
    (change,) = plan_recipe(SFT_RUN, changed, start)["trainer"]["changes"]
    assert (change["name"], change["was"], change["now"]) == ("loss.type", "likelihood", "my_loss:Own")
    assert '  --loss.type: "likelihood" -> "my_loss:Own" (accepted)\n' in capsys.readouterr().out


def test_another_optimiser_is_refused(tmp_path: Path):
    """Its state is another's; a step of earlier versions, which does not say, has AdamW's."""
    data = write_records(tmp_path / "a.jsonl", 50)
    saved = plan_recipe(SFT_RUN, sft(tmp_path, data), FRESH)
    start = start_at(tmp_path, saved)
    muon = sft(tmp_path, data, optimizer={"type": "muon"})
    with pytest.raises(UsageError, match=r"optimizer\.type adamw, from which muon can't go on"):
        plan_recipe(SFT_RUN, muon, start)
    del saved["trainer"]["settings"]["optimizer.type"]
    start = start_at(tmp_path, saved)
    assert plan_recipe(SFT_RUN, sft(tmp_path, data), start)["trainer"]["changes"] == []
    with pytest.raises(UsageError, match=r"begin a new run with its weights: --model\.name .*step_"):
        plan_recipe(SFT_RUN, muon, start)


def test_an_older_checkpoint_goes_on_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What it knows is compared all the same."""
    data = write_records(tmp_path / "a.jsonl", 50)
    config = sft(tmp_path, data)
    old = {"config": config.model_dump(), "data": {"records": 50, "first_and_last": "0123456789abcdef"}}
    start = start_at(tmp_path, None, trainer=old)
    assert plan_recipe(SFT_RUN, config, start)["trainer"]["changes"] == []
    assert "was saved by a version of Cairn that kept no recipe" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"--data.name: 50 records"):
        plan_recipe(SFT_RUN, sft(tmp_path, write_records(tmp_path / "b.jsonl", 49)), start)
    with pytest.raises(UsageError, match=r"--data.batch-size: 4 -> 8"):
        plan_recipe(SFT_RUN, sft(tmp_path, data, batch_size=8), start)


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer.json"])
def test_another_tokenizer_is_refused(tmp_path: Path, file: str):
    """A run goes on with the checkpoint's, whatever --model.name holds by now."""
    data = write_records(tmp_path / "a.jsonl", 50)
    start = start_at(tmp_path, plan_recipe(SFT_RUN, sft(tmp_path, data), FRESH))
    path = tmp_path / "model" / file
    path.write_text(path.read_text() + " ")
    with pytest.raises(UsageError, match=r"--model.name .*: its tokenizer or chat template differs"):
        plan_recipe(SFT_RUN, sft(tmp_path, data), start)


# Environments


class Slow(ReverseText):
    """Takes its time to say what a problem is."""

    def messages(self, problem: int) -> list[dict[str, str]]:
        time.sleep(0.01)
        return super().messages(problem)


class Versioned(ReverseText):
    """Says what it is."""

    identity = "2"


def rl(tmp_path: Path, *, accept: tuple[str, ...] = (), **orchestrator: Any) -> RLConfig:
    """The configuration of an RL run."""
    environment = orchestrator.pop("environment", {"args": {"problems": 20, "seed": 1}})
    return RLConfig(
        model=ModelConfig(name=str(tmp_path / "model")),
        ckpt=CkptConfig(resume_step=STEP, accept_changes=list(accept)),
        orchestrator={"environment": environment, **orchestrator},
    )


def plan_rl(config: RLConfig, start: Start, environment: ReverseText | None = None) -> dict:
    """As `rl` does it."""
    environment = environment or ReverseText(**config.orchestrator.environment.args)
    return plan_recipe(KINDS["rl"], config, start, orchestrator_recipe(config.orchestrator, environment))


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        (
            "environment",
            {"environment": {"args": {"problems": 20, "seed": 2}}},
            r'--orchestrator.environment.args: {"problems": 20, "seed": 1} -> {"problems": 20, "seed": 2}\n'
            r"  --orchestrator.environment: 20 problems \(\w{12}\) ->",
        ),
        ("prompts_per_step", {"prompts_per_step": 3}, "--orchestrator.prompts-per-step: 16 -> 3"),
        ("samples_per_prompt", {"samples_per_prompt": 3}, "--orchestrator.samples-per-prompt: 8 -> 3"),
    ],
)
def test_another_environment_or_batch_takes_consent(tmp_path: Path, name: str, changed: dict, words: str):
    """Both roles keep the change; answers by another environment are asked for again."""
    start = start_at(tmp_path, plan_rl(rl(tmp_path), FRESH))
    assert plan_rl(rl(tmp_path), start)["orchestrator"]["changes"] == []
    with pytest.raises(UsageError, match=words):
        plan_rl(rl(tmp_path, **changed), start)
    recipe = plan_rl(rl(tmp_path, **changed, accept=(name,)), start)
    assert recipe["trainer"]["changes"] == recipe["orchestrator"]["changes"] != []
    assert recipe["prompts_again"] == (name != "prompts_per_step")


def test_how_answers_are_compared_is_part_of_the_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = plan_rl(rl(tmp_path), FRESH)
    settings = recipe["orchestrator"]["settings"]
    assert (settings["advantage.type"], settings["advantage.args"]) == ("grpo", {})
    start = start_at(tmp_path, recipe)
    assert plan_rl(rl(tmp_path), start)["orchestrator"]["changes"] == []
    changed = rl(tmp_path, advantage={"args": {"normalize": False}})
    assert len(plan_rl(changed, start)["orchestrator"]["changes"]) == 1
    assert '--orchestrator.advantage.args: {} -> {"normalize": false}' in capsys.readouterr().out


@pytest.mark.slow
def test_an_environment_is_known_by_its_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By all of them, also by what could be seen of it in time, and by what it says of itself."""

    def of(environment: ReverseText) -> dict:
        return orchestrator_recipe(OrchestratorConfig(), environment)["environment"]

    assert same_environment(of(ReverseText(5000, seed=1)), of(ReverseText(5000, seed=1)))
    assert not same_environment(of(ReverseText(5000, seed=1)), of(ReverseText(5000, seed=2)))
    assert not same_environment(of(ReverseText(30, seed=1)), of(ReverseText(31, seed=1)))
    last = ReverseText(30, seed=1)
    last._texts[-1] = "other"
    assert not same_environment(of(ReverseText(30, seed=1)), of(last)), "up to the last problem"
    assert not same_environment(of(Versioned(30, seed=1)), of(ReverseText(30, seed=1)))
    assert same_environment({"problems": 30}, of(ReverseText(30, seed=1))), (
        "an older checkpoint knows no more"
    )

    monkeypatch.setattr(identity, "SECONDS", 0.05)
    slow = of(Slow(400, seed=1))
    assert 0 < len(slow["messages"]) < 5
    assert same_environment(slow, of(ReverseText(400, seed=1)))
    assert not same_environment(slow, of(ReverseText(400, seed=2)))


OWN = """
from cairn.orchestrator.environments import ReverseText

class Own(ReverseText):
    def reward(self, problem, answer):
        return {reward}

class Other(Own):
    pass
"""


def test_an_edited_reward_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Like an edited loss or advantage: no promise is broken, and all later checkpoints say so."""
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "own_module.py"
    module.write_text(OWN.format(reward=1.0))
    args = {"args": {"problems": 20, "seed": 1}}
    own = {
        "environment": {"name": "own_module:Own", **args},
        "advantage": {"type": "own_module:Own"},
    }
    loss = {"type": "own_module:Own"}
    environment = ReverseText(problems=20, seed=1)

    def config(**changed: Any) -> RLConfig:
        made = rl(tmp_path, **{**own, **changed})
        return made.model_copy(update={"trainer": TrainerConfig(loss=loss)})

    start = start_at(tmp_path, plan_rl(config(), FRESH, environment))
    assert plan_rl(config(), start, environment)["trainer"]["changes"] == []
    assert capsys.readouterr().out == ""
    module.write_text(OWN.format(reward=0.5))
    recipe = plan_rl(config(), start, environment)
    edited = r"the code of the class was edited \(\w{12} -> \w{12}\)\n"
    assert re.fullmatch(
        r"differences from step 5 .*\n"
        rf"  --trainer.loss: {edited}"
        rf"  --orchestrator.environment: {edited}"
        rf"  --orchestrator.advantage: {edited}",
        capsys.readouterr().out,
    )
    names = [change["name"] for change in recipe["orchestrator"]["changes"]]
    assert names == ["loss.code", "environment.code", "advantage.code"]
    assert not recipe["prompts_again"]
    other = {"environment": {"name": "own_module:Other", **args}}
    with pytest.raises(UsageError, match=r"environment.name: \S+Own. -> \S+Other.\nGive what was there"):
        plan_rl(config(**other), start, environment)


def test_each_of_several_environments_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Its settings by its label, and the mixture as a whole."""
    one = {"args": {"problems": 20}, "label": "one"}
    other = {"args": {"problems": 30}, "label": "other", "weight": 2.0}

    def plan(start: Start, *environments: dict, accept: tuple[str, ...] = ()) -> dict:
        config = rl(tmp_path, accept=accept, environment={}, environments=list(environments))
        made = [ReverseText(**one.args) for one in config.orchestrator.environments]
        return plan_recipe(KINDS["rl"], config, start, orchestrator_recipe(config.orchestrator, *made))

    first = plan(FRESH, one, other)
    again = plan(start_at(tmp_path, first), one, other)
    assert (again["trainer"]["changes"], again["prompts_again"]) == ([], False)
    longer = plan(start_at(tmp_path, first), one | {"sampling": {"max_tokens": 9}}, other)
    (change,) = longer["trainer"]["changes"]
    assert (change["name"], change["was"]) == ("environments.one.sampling.max_tokens", 256)
    assert "--orchestrator.environments.one.sampling.max-tokens: 256 -> 9" in capsys.readouterr().out
    with pytest.raises(
        UsageError, match=r"(?s)one x 1: 20 problems .* -> one x 3: .*accept-changes environment"
    ):
        plan(start_at(tmp_path, first), one | {"weight": 3.0}, other)
    with pytest.raises(UsageError, match=r"other.samples-per-prompt: 8 -> 4"):
        plan(start_at(tmp_path, first), one, other | {"samples_per_prompt": 4})
    accepted = plan(start_at(tmp_path, first), one, accept=("environment",))
    assert accepted["prompts_again"]
    alone = plan_rl(rl(tmp_path, accept=("environment",)), start_at(tmp_path, first))
    assert alone["prompts_again"]


def test_an_orchestrator_on_its_own_joins_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It compares its own part."""
    run = RunDirectory(tmp_path / "run")
    whole = plan_rl(rl(tmp_path), FRESH)
    start = start_at(tmp_path, whole)
    attempt = Attempt("abc", 2, "trainer", STEP, str(start.folder), "branch_1")
    write_json(run.recipe, {"trainer": whole["trainer"] | {"date": "2026-01-01"}})

    def join(*accept: str, **settings: Any) -> dict:
        args = settings.pop("args", {"problems": 20, "seed": 1})
        config = OrchestratorConfig(environment=EnvironmentConfig(args=args), **settings)
        part = orchestrator_recipe(config, ReverseText(**args))
        join_recipe(part, attempt, run, accept)
        return read_json(run.recipe)["orchestrator"]

    assert (join()["changes"], join()["date"]) == ([], "2026-01-01")
    assert [change["name"] for change in join(max_off_policy_steps=0)["changes"]] == ["max_off_policy_steps"]
    assert "--max-off-policy-steps: 1 -> 0" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"accept it with --ckpt.accept-changes environment"):
        join(args={"problems": 20, "seed": 2})
    with pytest.raises(UsageError, match=r"its trainer begins. .* with --ckpt.accept-changes environment as"):
        join("environment", args={"problems": 20, "seed": 2})


@pytest.mark.parametrize(
    ("name", "before", "after", "changed"),
    [
        ("process", {"environment": "a:B"}, {"environment": "a:B", "processes": 4, "at_once": 2}, False),
        ("process", {"environment": "a:B"}, {"environment": "a:C"}, True),
        ("openenv", {"url": "u", "wait": 3}, {"url": "u", "wait": 9, "message_timeout": 2.0}, False),
        ("agent", {"env": {"KEY": "one"}}, {"env": {"KEY": "two"}}, False),
        ("agent", {"env": {"KEY": "one"}}, {"env": {"OTHER": "one"}}, True),
    ],
)
def test_how_fast_an_environment_works_is_no_change_of_it(
    tmp_path: Path, name: str, before: dict, after: dict, changed: bool
):
    """Nor what an agent's variables are, which may be secrets; also if an older recipe has them all."""

    def recipe(args: dict[str, Any]) -> dict[str, Any]:
        config = OrchestratorConfig(environment=EnvironmentConfig(name=name, args=args))
        return orchestrator_recipe(config, ReverseText(problems=10))

    assert "one" not in json.dumps(recipe(before)) or name != "agent"
    older = recipe(before)
    older["settings"]["environment.args"] = before
    for saved in (recipe(before), older):
        make_folders(tmp_path / "orchestrator")
        record = {"recipe": saved, "prompts": {}, "progress": {}}
        write_json(tmp_path / "orchestrator" / "state.json", record)
        assert bool(changes_since(tmp_path, recipe(after))) == changed


def test_a_trainer_on_its_own_begins_the_branch_that_an_accepted_environment_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """It doesn't know the environment: consent is all that it goes by. The orchestrator joins that branch."""
    first = begin_alone(tmp_path)
    unchanged = begin_alone(tmp_path, "prompts_per_step")
    assert first.branch == unchanged.branch == ABOUT["branch"]
    attempt = begin_alone(tmp_path, "environment")
    assert (attempt.run_id, attempt.branch) == (first.run_id, f"branch_{attempt.number}")
    run = RunDirectory(tmp_path / "run")
    changed = {"args": {"problems": 20, "seed": 2}}
    part = orchestrator_recipe(
        OrchestratorConfig(environment=EnvironmentConfig(**changed)), ReverseText(**changed["args"])
    )
    join_recipe(part, attempt, run, ["environment"])
    recipe = read_json(run.recipe)
    assert recipe["prompts_again"]
    accepted = [(change["name"], change["accepted"]) for change in recipe["orchestrator"]["changes"]]
    assert ("environment", True) in accepted
    assert "differs from step_5: --environment: 20 problems" in capsys.readouterr().out


def begin_alone(tmp_path: Path, *accept: str) -> Attempt:
    """What the `trainer` command does before it trains, from a checkpoint of a whole run."""
    run = RunDirectory(tmp_path / "run")
    start = start_at(tmp_path, plan_rl(rl(tmp_path), FRESH))
    config = TrainerConfig(
        model=ModelConfig(name=str(tmp_path / "model")),
        output_dir=str(run.path),
        ckpt=CkptConfig(resume_step=STEP, accept_changes=list(accept)),
    )
    recipe = plan_recipe(KINDS["trainer"], config, start)
    try:
        return begin(run, config, start, recipe, command="trainer")
    finally:
        run.unlock()


# The date


def test_a_template_prints_the_date_of_the_runs_start_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A resume on another day makes the same tokens; so does one that begins again before any checkpoint."""
    data, run = write_records(tmp_path / "a.jsonl", 50), RunDirectory(tmp_path / "run")
    model = shutil.copytree(MODEL, tmp_path / "dated")
    (model / "chat_template.jinja").write_text(
        "{{ strftime_now('%d %b %Y') }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )

    def recipe_on(day: str, start: Start, *, goes_on: bool = False) -> dict:
        monkeypatch.setattr("cairn.launch.plan.recipe.now", lambda: f"{day}T12:00:00+00:00")
        recipe = plan_recipe(SFT_RUN, sft(tmp_path, data), start)
        finish_recipe(recipe, model, start, run, goes_on=goes_on)
        return recipe

    def tokens(recipe: dict) -> str:
        tokenizer = AutoTokenizer.from_pretrained(model)
        record = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
        arguments = template_arguments(recipe["trainer"])
        return tokenizer.decode(
            Encoder(tokenizer, template_arguments=arguments).whole([record], [0])[0].token_ids
        )

    first = recipe_on("2026-01-31", FRESH)
    assert tokens(first).startswith("31 Jan 2026<user>")
    start = start_at(tmp_path, first)
    assert tokens(recipe_on("2026-02-01", start)) == tokens(first)
    assert tokens(recipe_on("2026-02-01", dataclasses.replace(FRESH))) != tokens(first)
    run.path.mkdir(exist_ok=True)
    write_json(run.recipe, first)
    assert tokens(recipe_on("2026-02-01", FRESH, goes_on=True)) == tokens(first)


def test_other_templates_need_no_date(tmp_path: Path):
    """So checkpoints of the same run are the same on every day."""
    recipe = plan_recipe(SFT_RUN, sft(tmp_path, write_records(tmp_path / "a.jsonl", 50)), FRESH)
    finish_recipe(recipe, MODEL, FRESH, RunDirectory(tmp_path), goes_on=False)
    assert "date" not in recipe["trainer"]
    assert len(recipe["trainer"]["tokenizer"]) == len(recipe["trainer"]["model"]) == 32


# The base model


def test_the_model_that_a_run_began_with_stays_known(tmp_path: Path):
    """A run that goes on, a fork, and a new run from a step's weights have the first one's."""
    data, run = write_records(tmp_path / "a.jsonl", 50), RunDirectory(tmp_path / "run")

    def base(model: Path, start: Start) -> str | None:
        recipe = plan_recipe(SFT_RUN, sft(tmp_path, data), start)
        finish_recipe(recipe, model, start, run, goes_on=False)
        return recipe["trainer"].get("base")

    cached = shutil.copytree(MODEL, tmp_path / "models--tiny--Model-1.5b" / "snapshots" / "abc")
    assert base(MODEL, FRESH) == MODEL.name
    assert base(cached, FRESH) == "tiny/Model-1.5b"
    recipe = plan_recipe(SFT_RUN, sft(tmp_path, data), FRESH)
    finish_recipe(recipe, cached, FRESH, run, goes_on=False)
    start = start_at(tmp_path, recipe)
    assert start.folder is not None
    assert base(start.folder / "model", start) == "tiny/Model-1.5b"
    (start.folder / "manifest.json").touch()
    assert (
        base(shutil.copytree(MODEL, start.folder / "model", dirs_exist_ok=True), FRESH) == "tiny/Model-1.5b"
    )


def test_epochs_are_so_many_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Up to a whole step; the schedule is checked against them."""
    data = write_records(tmp_path / "a.jsonl", 50)
    records = {"name": str(data), "batch_size": BATCH, "epochs": 1.5}
    config = with_steps(SFT_RUN, SFTConfig(data=records), print)
    assert isinstance(config, SFTConfig)
    assert (config.max_steps, config.data.epochs) == (19, None)
    assert "data.epochs = 1.5: max_steps = 19, for 50 records and a batch of 4" in capsys.readouterr().out
    assert with_steps(SFT_RUN, config, print) is config
    late = {"type": "linear", "warmup_steps": 19}
    with pytest.raises(UsageError, match="warmup_steps = 19 leaves no step"):
        with_steps(SFT_RUN, SFTConfig(data=records, scheduler=late), print)
    with pytest.raises(ValueError, match=r"max_steps beside data\.epochs"):
        SFTConfig(data=records, max_steps=5)
    for many in ({"read": "stream"}, {"name": "", "sets": [{"name": str(data)}]}):
        with pytest.raises(ValueError, match=r"data\.epochs = 1\.5: .*; give max_steps instead"):
            SFTConfig(data=records | many)


def test_the_place_in_the_data_is_saved_where_records_are_no_samples(tmp_path: Path):
    """Other data begins behind the records that were taken, however many samples they were."""
    data = write_records(tmp_path / "a.jsonl", 50)
    taken = {"trainer": {"position": {"records": 33, "sources": {}}}}
    start = start_at(tmp_path, plan_recipe(SFT_RUN, sft(tmp_path, data), FRESH), **taken)
    other = write_records(tmp_path / "b.jsonl", 40)
    recipe = plan_recipe(SFT_RUN, sft(tmp_path, other, accept=("data",)), start)
    assert recipe["trainer"]["data"]["begins_at"] == 33


def test_another_weight_of_a_data_set_takes_consent(tmp_path: Path):
    """Several data sets have no common end of an epoch at which that would be nothing."""
    names = [write_records(tmp_path / f"{letter}.jsonl", 10) for letter in "ab"]

    def mixed(weight: float) -> SFTConfig:
        config = sft(tmp_path, names[0])
        sets = [{"name": str(names[0])}, {"name": str(names[1]), "weight": weight}]
        return config.model_copy(update={"data": SFTDataConfig(sets=sets, batch_size=BATCH)})

    start = start_at(tmp_path, plan_recipe(SFT_RUN, mixed(1), FRESH))
    assert plan_recipe(SFT_RUN, mixed(1), start)["trainer"]["changes"] == []
    with pytest.raises(UsageError, match=r"data.*b x 1: 10 records .* -> .*b x 2: 10 records"):
        plan_recipe(SFT_RUN, mixed(2), start)
