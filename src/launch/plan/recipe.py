"""Compares a run's recipe (data, model, environment, settings) with the checkpoint that it resumes from."""

import contextlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step_folder import StepFolder, TrainerRecord
from cairn.config.kinds import KINDS, RunConfig, RunKind
from cairn.config.model import LoraConfig
from cairn.config.teachers import critic_problem
from cairn.formats import FORMATS
from cairn.launch.plan.model import foreign_format
from cairn.launch.plan.other_models import check_auxiliary_models
from cairn.launch.plan.preflight import look_at_records
from cairn.launch.plan.run_plan import Draft
from cairn.launch.start import Start
from cairn.model.adapters import base_of_adapter, held_base
from cairn.model.described import QUANTIZATION, about_model
from cairn.orchestrator.environment_identity import changes_since, unknown_since
from cairn.run.changes import Change, Settings, check_accepted, in_words, measured_anew
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.exits import RoleFailed
from cairn.run.files import DamagedFile, read_json, write_json
from cairn.run.messages import Attempt
from cairn.run.output import importing, start_logging
from cairn.run.recipe import (
    NOT_ARCHITECTURE,
    TRAINER,
    base_of,
    code_in,
    in_one_form,
    model_of,
    now,
    prints_date,
    settings_of,
    tokenizer_of,
)
from cairn.run.waiting import wait_for

OF_HEADS = {"architectures", "id2label", "label2id"}
"""What config.json says of the head, which a reward model has in the place of its base's."""
PROMPTS_AGAIN = {"environment", "samples_per_prompt"}
"""Changes that make answers useless which wait to be trained on."""


def plan_recipe(
    kind: RunKind, config: RunConfig, start: Start, orchestrator: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The run's recipe, compared with that of the checkpoint; differences are printed.

    Args:
        orchestrator: the orchestrator's part, if `rl` starts the whole run.

    Returns:
        The content of recipe.json: `trainer` and `orchestrator`, each saved in that role's part of a
        checkpoint, and `prompts_again`, whether waiting answers must be dropped.

    Raises:
        UsageError: the data can't be trained on; or a difference would break a promise and is not listed in
            `--ckpt.accept-changes`.
    """
    trainer = kind.trainer(config)
    settings = settings_of(trainer.model_dump(), TRAINER)
    recipe: dict[str, Any] = {
        "trainer": {"settings": settings | code_in(settings), "free": sorted(TRAINER.free)}
    }
    recipe["trainer"] |= look_at_records(trainer)
    if orchestrator is not None:
        recipe["orchestrator"] = dict(orchestrator)
    if start.folder is None:
        return recipe

    check_model(config.model.name, start)
    check_adapter(trainer.lora, start, kind.flags("trainer"))
    saved = _saved_recipe(start)
    check_auxiliary_models(trainer, start, kind.flags("trainer"))
    _check_optimizer(start, saved["settings"], settings["optimizer.type"], kind.flags("trainer"))
    before, defaults = Settings.of(saved), settings_of(type(trainer)().model_dump(), TRAINER)
    changes = before.changes(recipe["trainer"]["settings"], TRAINER, defaults)
    unknown = before.unknown(recipe["trainer"]["settings"], defaults)
    if "data" in recipe["trainer"]:
        changes += _go_on_in_data(start, saved.get("data"), recipe["trainer"]["data"])
    changes += _exchanged_validations(saved, recipe["trainer"])
    flags = {change.name: kind.flags("trainer") for change in changes}
    if "orchestrator" in recipe:
        of_orchestrator = changes_since(start.folder, recipe["orchestrator"])
        unknown += unknown_since(start.folder, recipe["orchestrator"])
        flags |= {change.name: kind.flags("orchestrator") for change in of_orchestrator}
        changes += of_orchestrator
    accepted = config.ckpt.accept_changes if config.ckpt else []
    for prefix in dict.fromkeys(flags.values()):
        check_accepted([c for c in changes if flags[c.name] == prefix], accepted, start.folder, prefix)
    if changes:
        print(f"differences from step {start.step} (saved -> now):", flush=True)
    for change in changes:
        is_accepted = " (accepted)" if change.accept else ""
        print(f"  {in_words(change, flags[change.name])}{is_accepted}", flush=True)
    if unknown:
        print(
            f"note: the version of Cairn that saved step {start.step} kept no record of "
            f"{', '.join(unknown)}: whether these are as before is not known",
            flush=True,
        )
    noted = [change.at(start.step, bool(change.accept)) for change in changes]
    for prefix in measured_anew(noted):
        print(
            f"  {prefix}: its numbers up to step {start.step} are not compared with later ones "
            "(ckpt.keep_best, patience)",
            flush=True,
        )
    for part in ("trainer", "orchestrator"):
        if part in recipe:
            recipe[part]["changes"] = [*saved.get("changes", []), *noted]
    again = {change.accept for change in changes}
    if orchestrator is None and "orchestrator" in kind.parts:  # it is started on its own, and joins later
        again |= set(accepted)
    recipe["prompts_again"] = not again.isdisjoint(PROMPTS_AGAIN)
    return recipe


def finish_recipe(
    recipe: dict[str, Any], model: Path, start: Start, run: RunDirectory, *, goes_on: bool
) -> None:
    """Add what the model's folder determines: its name, tokenizer, architecture, and the template's date.

    The name stays that of the model with which the run began, also in forks and runs that go on.

    Args:
        model: Hugging Face directory that the run starts or resumes from.
        goes_on: whether the run began before, even if it has no checkpoint yet.
    """
    trainer = recipe["trainer"]
    trainer |= {"model": model_of(model), "tokenizer": tokenizer_of(model)}
    folder = start.folder or StepFolder.holding(model)
    if folder is None:
        trainer["base"] = base_of(model)
    elif base := ((StepFolder(folder).trainer_state() or TrainerRecord()).recipe or {}).get("base"):
        trainer["base"] = base
    if prints_date(model):
        earlier: Mapping[str, Any] = {}
        if start.folder:
            earlier = _trainer_state(start).recipe or {}
        elif goes_on:
            with contextlib.suppress(DamagedFile):
                earlier = (read_json(run.recipe, dict) or {}).get("trainer", {})
        date = earlier.get("date") or now()
        for part in ("trainer", "orchestrator"):
            if part in recipe:
                recipe[part]["date"] = date


def wait_for_trainer(draft: Draft) -> Draft:
    """With the attempt of a trainer in the same output folder, which a separate orchestrator waits for.

    Raises:
        RoleFailed: there is none in time, or its run needs no separate orchestrator.
    """
    start_logging()
    run = RunDirectory(draft.given.output_dir)
    print(f"waiting for a trainer in {run.path}", flush=True)
    attempt = wait_for(
        run.live_attempt,
        seconds=draft.given.version_timeout,
        whom=f"a trainer in {run.path}",
        setting="--version-timeout",
    )
    kind = KINDS[attempt.command]
    if "orchestrator" in kind.roles or "orchestrator" not in kind.parts:
        raise RoleFailed(f"{run.path} is a run of {attempt.command}, which needs no separate orchestrator")
    return draft.having(attempt=attempt)


def join(draft: Draft) -> Draft:
    """With the settings that the roles of a run share as its trainer has them, and its model.

    Raises:
        UsageError: the orchestrator's part of the recipe does not fit the run's; see `join_recipe`.
    """
    assert draft.attempt is not None
    assert draft.checked is not None
    trainer = KINDS[draft.attempt.command].trainer(trainers_config(draft))
    of_trainer = ("model", "seed", "max_steps", "ckpt", "teachers", "router_replay")
    shared = {key: getattr(trainer, key) for key in of_trainer}
    config = draft.settled.model_copy(update=shared)
    accepted = {name for ckpt in (draft.settled.ckpt, config.ckpt) if ckpt for name in ckpt.accept_changes}
    join_recipe(draft.checked.recipe, draft.attempt, config.run_directory(), accepted)
    return draft.having(config=config, model=trainer.model.name)


def trainers_config(draft: Draft) -> Any:
    """The configuration of the run that a separate orchestrator joins."""
    assert draft.attempt is not None
    return RunDirectory(draft.given.output_dir).read_config(KINDS[draft.attempt.command].config)


def join_recipe(
    orchestrator: Mapping[str, Any], attempt: Attempt, run: RunDirectory, accepted: Collection[str]
) -> None:
    """Add the part of an orchestrator that was started separately to the recipe of the run that it joins.

    Args:
        accepted: the changes that the user accepts, as either role's settings name them.

    Raises:
        UsageError: it differs from the checkpoint's in a way that would break a promise, and the user has not
            accepted that, or the trainer has not begun the new branch that the change requires.
    """
    recipe = read_json(run.recipe, dict) or {"trainer": {}}
    _check_advantages(orchestrator, recipe["trainer"])
    part = {**orchestrator, **{key: recipe["trainer"][key] for key in ("date",) if key in recipe["trainer"]}}
    if attempt.resume_from:
        checkpoint = Path(attempt.resume_from)
        changes = changes_since(checkpoint, orchestrator)
        check_accepted(changes, accepted, checkpoint)
        for change in changes:
            if change.accept in PROMPTS_AGAIN and not recipe.get("prompts_again"):
                raise UsageError(
                    f"{in_words(change)}: this takes a new branch of the run, which its trainer begins. Stop "
                    f"the trainer, and start it with --ckpt.accept-changes {change.accept} as well"
                )
            print(f"differs from {checkpoint.name}: {in_words(change)}", flush=True)
        noted = [change.at(attempt.start_step, bool(change.accept)) for change in changes]
        part["changes"] = [*recipe["trainer"].get("changes", []), *noted]
    write_json(run.recipe, {**recipe, "orchestrator": part}, durable=True)


def _check_advantages(orchestrator: Mapping[str, Any], trainer: Mapping[str, Any]) -> None:
    """Check that a trainer can make use of an orchestrator's advantages.

    Raises:
        UsageError: it can't.
    """
    several: Mapping[str, Mapping[str, Any]] = orchestrator.get("environments", {})
    settings = [orchestrator["settings"], *several.values()]
    types = {str(one["advantage.type"]) for one in settings if "advantage.type" in one}
    critic = any(name.startswith("critic.") for name in trainer.get("settings", {}))
    if problem := critic_problem(critic, types):
        raise UsageError(problem)


def check_model(name: str, start: Start) -> None:
    """Check that a local `--model.name` is the model of the checkpoint, since a run resumes with the latter.

    Raises:
        UsageError: it has another architecture, tokenizer or chat template.
    """
    assert start.folder is not None
    folders = Path(name), StepFolder(name).model
    own = next((folder for folder in folders if FORMATS["hf"].detect(folder)), None)
    saved = StepFolder(start.folder).model
    if own is None:
        return
    apart = NOT_ARCHITECTURE | OF_HEADS
    if foreign_format(own) is not None:  # then these were corrected when the run began
        apart |= {"tie_word_embeddings", QUANTIZATION}
    ours, theirs = (in_one_form(about_model(folder)) for folder in (own, saved))
    if _differing(ours, theirs, apart):
        with contextlib.suppress(Damaged):  # an edited file may contradict itself
            ours, theirs = (_with_defaults(folder) for folder in (own, saved))
    different = [
        f"{key} {theirs.get(key)} there, {ours.get(key)} here" for key in _differing(ours, theirs, apart)
    ]
    if not different and tokenizer_of(own) != tokenizer_of(saved):
        different = ["its tokenizer or chat template differs; a run resumes with the checkpoint's"]
    if different:
        raise UsageError(
            f"--model.name {name} is not the model in {start.folder}: {'; '.join(different)}. "
            "Leave --model.name as it was to resume, or start a new run in another --output-dir"
        )


def _differing(a: Mapping[str, Any], b: Mapping[str, Any], apart: Collection[str]) -> list[str]:
    """The keys whose values differ, apart from some."""
    return [key for key in sorted((a.keys() | b.keys()) - set(apart)) if a.get(key) != b.get(key)]


def _with_defaults(folder: Path) -> dict[str, Any]:
    """A folder's configuration as transformers understands it: any form of it, and what it leaves out."""
    with importing():
        from cairn.model.untrusted_config import load_config  # takes seconds, and is hardly ever needed

    return load_config(folder).to_dict()


def check_adapter(lora: LoraConfig | None, start: Start, flags: str) -> None:
    """Check that a run goes on with an adapter of the same shape if the checkpoint has one, and of its base.

    Args:
        flags: what the flags of the trainer's settings begin with.

    Raises:
        UsageError: it does not, or the base is not there.
    """
    assert start.folder is not None
    model = StepFolder(start.folder).model
    record = base_of_adapter(model)
    if record is None or lora is None:
        if lora is not None:
            raise UsageError(
                f"{flags}lora: {start.folder} was trained in full, and an adapter can't go on with that; "
                f"start a new run from its weights: --model.name {start.folder}"
            )
        if record is not None:
            raise UsageError(
                f"{start.folder} holds an adapter, and this run has no [lora]: give the section that it had "
                f"({_shown(record.lora, flags)}), or start a new run from the merged weights: --model.name "
                f"{start.folder}"
            )
        return
    different = {key: was for key, was in record.lora.items() if lora.shape.get(key) != was}
    if different:
        here = _shown({key: lora.shape.get(key) for key in different}, flags)
        raise UsageError(
            f"{here}: the adapter in {start.folder} has {_shown(different, flags)}. Give that to go on, or "
            f"start a new run from the merged weights: --model.name {start.folder}"
        )
    try:
        if held_base(model) and not (lora.save_base or lora.base):
            record.find(model, record.folder)
            return
        record.find(model, lora.base)
    except CheckpointError as error:
        own = held_base(model)
        more = f"; or go on with the one that the step holds: {flags}lora.save-base" if own else ""
        raise UsageError(f"{error}{more}") from None


def _shown(settings: Mapping[str, Any], flags: str) -> str:
    """Settings of an adapter as they are given on the command line."""
    given = {
        key.replace("_", "-"): ",".join(value) if isinstance(value, list) else json.dumps(value)
        for key, value in settings.items()
        if value != []
    }
    return " ".join(f"{flags}lora.{key} {value}" for key, value in given.items())


def _exchanged_validations(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """The validations whose records are others than before, as far as the checkpoint says what they were."""
    from cairn.run.data_sets import same_records

    before, after = saved.get("validations", {}), now.get("validations", {})
    return [
        Change(f"validation[{name}].data", before[name], after[name])
        for name in after
        if name in before and not same_records(before[name], after[name])
    ]


def _saved_recipe(start: Start) -> Mapping[str, Any]:
    """The trainer's recipe in the checkpoint; reconstructed as far as possible from an older version's."""
    state = _trainer_state(start)
    if state.recipe is not None:
        return {"settings": {}, **state.recipe}
    print(
        f"note: {start.folder} was saved by a version of Cairn that kept no recipe: only the number of "
        "records is compared, and of Parquet the first and last one",
        flush=True,
    )
    data = {"data": state.data} if state.data else {}
    return {"settings": settings_of(state.config or {}, TRAINER), **data}


def _check_optimizer(start: Start, saved: Mapping[str, Any], now: str, flags: str) -> None:
    """Check that the checkpoint's optimiser is the run's: another can't go on from its state.

    Raises:
        UsageError: it is another.
    """
    before = saved.get("optimizer.type", "adamw")  # which was the only one
    if before != now:
        raise UsageError(
            f"{start.folder} has the state of {flags}optimizer.type {before}, from which {now} can't go on. "
            f"Give {flags}optimizer.type {before}, or begin a new run with its weights: "
            f"{flags.removesuffix('trainer.')}model.name {start.folder} and another output_dir"
        )


def _trainer_state(start: Start) -> TrainerRecord:
    assert start.folder is not None
    return StepFolder(start.folder).trainer_state() or TrainerRecord()


def _go_on_in_data(start: Start, saved: Mapping[str, Any] | None, data: dict[str, Any]) -> list[Change]:
    """The change of data, if any. New data begins with its first epoch (`begins_at`, in records taken).

    In the middle of an epoch the user has to accept the change, because the rest of the epoch is skipped; of
    several data sets, and of streams, that is so at any time. Data of which some records were mended keeps
    its place, which takes consent all the same.
    """
    from cairn.run.data_sets import mended, same_records

    if not saved:
        return []
    begins_at = saved.get("begins_at", 0)
    data["begins_at"] = begins_at
    if same_records(saved, data):
        return []
    if mended(saved, data):
        return [Change("data", dict(saved), dict(data), "data")]
    taken = data["begins_at"] = _trainer_state(start).records
    within = "records" not in saved or (taken - begins_at) % saved["records"] != 0
    return [Change("data", dict(saved), dict(data), "data" if within else None)]
