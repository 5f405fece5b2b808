"""Recipes: the inputs of each segment of the run, and whether each change of them was recorded."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cairn.checkpoint.manifest import Manifest
from cairn.checkpoint.step_folder import StepFolder, TrainerRecord
from cairn.checkpoint.store import CheckpointStore
from cairn.orchestrator.environment_identity import same_environment
from cairn.run.changes import Settings
from cairn.run.data_sets import same_records
from cairn.run.files import DamagedFile
from cairn.run.recipe import INPUTS, ORCHESTRATOR, TRAINER, Compared, inputs_of
from cairn.run.view import RunView
from cairn.tools.audit.report import Report, Segment
from cairn.tools.audit.steps import read_state


@dataclass(frozen=True)
class Recipe:
    """How the steps after the previous recipe, up to `step`, were made, as far as it is known.

    changes: changes of the recipe up to there; each has its `name` and the `step` after which it applies.
    """

    step: int | None
    """The checkpoint that contains it; None: recipe.json, for steps after the newest checkpoint."""
    settings: Mapping[str, Any]
    inputs: Mapping[str, Any]
    changes: list[Mapping[str, Any]]
    parts: tuple[tuple[Compared, Settings], ...] = ()
    """The settings of each role, and what is compared of them."""

    @property
    def data(self) -> Mapping[str, Any]:
        """The data set in SFT: `records`, `digest`, and the number of samples at which it begins."""
        return self.inputs.get("data") or {}


def read_recipes(
    store: CheckpointStore,
    manifests: dict[int, Manifest],
    config: Mapping[str, Any],
    view: RunView,
    report: Report,
) -> list[Recipe]:
    """The recipes of all checkpoints in order, then the current one; older checkpoints have only parts."""
    recipes = []
    for step in sorted(manifests):
        state = read_state(store, step, report)
        if state is None:
            continue
        try:
            part = StepFolder(store.folder(step)).orchestrator_state()
        except DamagedFile as error:
            report.broken("recipe", str(error), step)
            part = None
        recipes.append(_recipe(step, state, (part and part.recipe) or {}))
    try:
        current = view.recipe() or {}
    except DamagedFile as error:
        report.notes.append(str(error))
        current = {}
    state = TrainerRecord(
        recipe=current.get("trainer"),
        config=dict(config),
        data=dict(recipes[-1].data) if recipes and not current else None,
    )
    return [*recipes, _recipe(None, state, current.get("orchestrator", {}))]


def _recipe(step: int | None, state: TrainerRecord, orchestrator: Mapping[str, Any]) -> Recipe:
    trainer = state.recipe or {
        "settings": {"data.batch_size": (state.config or {}).get("data", {}).get("batch_size")},
        "data": state.data,
    }
    inputs = inputs_of(trainer, orchestrator)
    changes: list[Mapping[str, Any]] = []
    for change in [*trainer.get("changes", []), *orchestrator.get("changes", [])]:
        changes += [] if change in changes else [change]  # in a run of both, both roles keep all
    parts = ((TRAINER, Settings.of(state.recipe or {})), (ORCHESTRATOR, Settings.of(orchestrator)))
    return Recipe(step, trainer.get("settings", {}), inputs, changes, parts)


def check_recipes(recipes: list[Recipe], manifests: dict[int, Manifest], report: Report) -> None:
    """Check that inputs change only where a change was recorded, which needs the user's consent."""
    first = 1 if report.first_step is None else report.first_step
    for recipe in recipes:
        report.changes += [dict(change) for change in recipe.changes if change not in report.changes]
    before: Recipe | None = None
    for recipe in recipes:
        last = report.last_step if recipe.step is None else recipe.step
        if last is None or last < first:
            continue
        if before is not None and not _differing(before, recipe):
            report.trained_on[-1].last_step = last
        else:
            report.trained_on.append(Segment(first, last, dict(recipe.inputs)))
        if before is not None:
            _check_change(before, recipe, first, last, report)
        before, first = recipe, last + 1


def _check_change(before: Recipe, after: Recipe, first: int, last: int, report: Report) -> None:
    _check_settings(before, after, first, last, report)
    noted = {change["name"].split(".")[0] for change in after.changes if first - 1 <= change["step"] < last}
    for key in _differing(before, after):
        if key not in noted:
            what = f"steps {first} to {last} were trained on a different {key} than step {first - 1}"
            rows = before.inputs[key], after.inputs[key]
            report.broken("recipe", f"{what}, and no accepted change is recorded", *rows)


def _check_settings(before: Recipe, after: Recipe, first: int, last: int, report: Report) -> None:
    """Check that each change of a setting is on record; what earlier versions did not record is a note."""
    noted = {change["name"] for change in after.changes if first - 1 <= change["step"] < last}
    for (compared, was), (_, now) in zip(before.parts, after.parts, strict=True):
        if not was.values or not now.values:
            continue
        changes = was.changes(now.values, compared, now.values)
        names = [change.name for change in changes if change.name not in noted]
        if not names:
            continue
        what = f"steps {first} to {last} were made with other settings than step {first - 1}"
        what = f"{what} ({', '.join(names)}), and no change is recorded"
        if now.free is None:
            report.notes.append(f"{what}: the version of Cairn that resumed the run did not compare these")
        else:
            report.broken("recipe", what, *({"was": c.was, "now": c.now} for c in changes if c.name in names))


def _differing(one: Recipe, other: Recipe) -> list[str]:
    """The inputs that differ, of those that both recipes have."""
    both = [key for key in INPUTS if key in one.inputs and key in other.inputs]
    same = {"data": same_records, "environment": same_environment}
    return [key for key in both if not same.get(key, operator.eq)(one.inputs[key], other.inputs[key])]
