"""How evaluations have rated the steps of a store: what `keep_best` goes by if its metric is an evaluation's.

A result arrives after its step was saved, so it is not in the manifest. The orchestrator alone notes it in
`ratings.json` beside the steps, as it has the results in the run's evals.jsonl; policies are named as servers
know them. So retention is a function of what is on the disk, also after a restart.

A run that was resumed with other held-out records, or another evaluation, of the same name has numbers that
can't be compared. The recipe in its newest step says since when.
"""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, Manifest
from cairn.checkpoint.step_folder import StepFolder, StepFolders
from cairn.run.changes import measured_anew
from cairn.run.files import DamagedFile, read_json, write_json
from cairn.run.messages import PolicyName
from cairn.run.metrics import number

RATINGS = "ratings.json"
PREFIX = "eval/"
"""Begins the names of metrics that are an evaluation's: eval/NAME/reward and so on."""


@dataclass(frozen=True)
class Ratings:
    """Numbers of evaluations, such as eval/NAME/reward, by the name of the policy."""

    by_policy: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    anew: Mapping[str, list[int]] = field(default_factory=dict[str, list[int]])
    """By the beginning of metrics' names, the steps whose numbers, and those before, can't be compared with
    later ones."""

    def metrics(self, manifest: Manifest) -> dict[str, Any]:
        """The metrics of a step, with the results of its own policy.

        Those in the manifest are of the policies that were evaluated while the step was trained.
        """
        own = {name: value for name, value in manifest.metrics.items() if not name.startswith(PREFIX)}
        name = str(PolicyName(manifest.run_id, manifest.branch, manifest.step))
        return {**own, **self.by_policy.get(name, {})}

    def measure(self, metric: str, step: int) -> int:
        """By which measure a step's number of this name is: how often that had changed before."""
        changed = (at for prefix, steps in self.anew.items() if metric.startswith(prefix) for at in steps)
        return sum(step > at for at in changed)

    @property
    def names(self) -> list[str]:
        """All metrics that there are."""
        return sorted({name for numbers in self.by_policy.values() for name in numbers})


def ratings_in(root: Path) -> Ratings:
    """What is noted in the folder of a store, and in its newest step.

    Raises:
        CheckpointError: the note can't be read, so any step may be the best.
    """
    path = root / RATINGS
    try:
        return Ratings(read_json(path, dict[str, dict[str, float]]) or {}, _anew(root))
    except DamagedFile as error:
        raise CheckpointError(
            f"{error}; remove it: a run that goes on writes it again from its evals.jsonl"
        ) from None


def _anew(root: Path) -> dict[str, list[int]]:
    """Since when numbers are of something else, as the newest step that can be read has it on record."""
    steps = StepFolders(root)
    for step in reversed(steps.steps()):
        folder = StepFolder(steps.folder(step))
        try:
            parts = folder.trainer_state(), folder.orchestrator_state()
        except DamagedFile:
            continue
        recipes = [(part and part.recipe) or {} for part in parts]
        return measured_anew(change for recipe in recipes for change in recipe.get("changes", []))
    return {}


def ratings_of(rows: Iterable[Mapping[str, Any]]) -> Ratings:
    """The ratings that the rows of evals.jsonl amount to; of a policy and evaluation, the last row counts."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        name = str(PolicyName(str(row.get("run_id")), str(row.get("branch")), int(row["step"])))
        prefix = f"{PREFIX}{row.get('name')}/"
        of_policy = {key: value for key, value in found.get(name, {}).items() if not key.startswith(prefix)}
        numbers = ((key, number(dict(row), key)) for key in row if key != "step")
        found[name] = of_policy | {f"{prefix}{key}": value for key, value in numbers if value is not None}
    return Ratings(found)


def note(root: Path, ratings: Ratings) -> None:
    """Note the ratings in the folder of a store, unless that is what it says."""
    with contextlib.suppress(CheckpointError):
        if ratings_in(root).by_policy == ratings.by_policy:
            return
    root.mkdir(parents=True, exist_ok=True)
    write_json(
        root / RATINGS, {name: dict(numbers) for name, numbers in ratings.by_policy.items()}, durable=True
    )
