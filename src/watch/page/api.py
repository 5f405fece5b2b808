"""What the page asks: typed functions over the one reader of run directories, so that all numbers are theirs.

Every answer is a function of the files at this moment. What is costly is kept as long as the files that it
comes from are the same.
"""

import contextlib
import dataclasses
import datetime
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step_folder import StepFolders
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tiers import Tier
from cairn.orchestrator.ledger import is_quiet, read_summary
from cairn.orchestrator.rollout_log import SCHEMA, KeptRollouts, Row
from cairn.run.errors import UsageError
from cairn.run.files import DamagedFile
from cairn.run.jsonlines import as_object
from cairn.run.trained_tokens import TrainedTokens
from cairn.run.view import RunView
from cairn.watch import evaluations
from cairn.watch.commands import find_runs
from cairn.watch.overview import Overview, overview
from cairn.watch.page import accounts, answers, curves, events
from cairn.watch.page.rollout_index import FoundRollouts, RolloutIndex, RolloutQuery, whole_rows
from cairn.watch.trained_tokens import StepTokens

if TYPE_CHECKING:
    from cairn.remote.remote_runs import RemoteRun, RemoteRuns

LOOK_SECONDS = 2.0
"""For so long a list of the runs below a folder is kept."""
ALIVE_SECONDS = 1.0
"""For so long the overview of a run that is going on is kept if its files are the same."""
ENDED_SECONDS = 30.0
"""Likewise, of a run that has ended."""
LEDGER_SECONDS = 5.0
"""For so long what the ledger says is kept."""
Value = TypeVar("Value")


class UnknownRun(UsageError):
    """There is no such run below the folder."""


@dataclass(frozen=True)
class RunLine:
    """A run in the list of runs; `damaged` says why nothing else is known of it."""

    id: str
    path: str
    command: str | None = None
    state: str = "damaged"
    step: int = 0
    max_steps: int | None = None
    label: str | None = None
    newest: float | None = None
    age: float | None = None
    findings: Sequence[str] = ()
    resume: str | None = None
    damaged: str | None = None


class RunReader:
    """One run, as the page reads it. One thread at a time: whoever uses it holds `lock`."""

    def __init__(self, id: str, path: Path, remote: "RemoteRun | None" = None):
        """remote: the run in an object store whose small files are copied to `path`."""
        self.id = id
        self.name = str(remote or path)
        self._remote = remote
        self.lock = threading.Lock()
        self.view = remote.view() if remote else RunView(path)
        self.index = RolloutIndex(KeptRollouts(self.view.run.rollouts))
        self._tokens = TrainedTokens(self.view.run.tokens)
        self._kept: dict[str, tuple[object, float, Any]] = {}
        self._glance: tuple[Overview, str, float] | None = None
        self._decoder: answers.Decoder | None = None

    def steps(self) -> Tier:
        """Where its checkpoints are."""
        return self._remote.steps if self._remote else CheckpointStore(self.view.checkpoints())

    def steps_name(self) -> str:
        """What people call that place."""
        return str(self._remote or self.view.checkpoints())

    def kept(self, name: str, make: Callable[[], Value], *, seconds: float | None = None) -> Value:
        """What `make` makes, made again when a file of the run has changed, or after so many seconds."""
        stamp, now = self.view.stamp(), time.monotonic()
        if name in self._kept:
            earlier, until, value = self._kept[name]
            if earlier == stamp and (seconds is None or now < until):
                return value
        value = make()
        self._kept[name] = stamp, now + (seconds or 0.0), value
        return value

    def rows(self) -> Sequence[Row]:
        """The rows of metrics.jsonl."""
        return self.view.metrics()

    def overview(self) -> tuple[Overview, str]:
        """The run at a glance and the stamp before it; at most a twentieth of a core is spent on it."""
        stamp, now = self.view.stamp(), time.monotonic()
        if self._glance is not None:
            shown, earlier, made = self._glance
            since = now - made
            fresh = stamp == earlier and since < (ALIVE_SECONDS if shown.is_going_on else ENDED_SECONDS)
            if fresh or since < shown.pause(0.0):
                return shown, earlier
        shown = overview(self.view, here=self.name)
        self._glance = shown, stamp, now
        return shown, stamp

    def trained(self, step: int) -> StepTokens:
        """What the trainer has learned from in a step; that of one step is kept."""
        known = self._kept.get("tokens")
        if known is not None and known[2][0] != step:
            del self._kept["tokens"]
        return self.kept("tokens", lambda: (step, StepTokens(self._tokens.read(step))))[1]

    def decoder(self) -> answers.Decoder | None:
        """What makes texts of the run's tokens, once it is found: the tokenizer stays the same."""
        if self._decoder is None:
            self._decoder = answers.decoder_in(_models(self.view))
        return self._decoder


class RunApi:
    """All runs below a folder; each method is one thing that the page asks, by the id of a run.

    Every method may raise DamagedFile, if a file of the run as a whole can't be read.
    """

    def __init__(self, folder: Path, price: float | None = None, remote: "RemoteRuns | None" = None):
        """price: of an hour of the machines of a run. remote: runs that are copied into `folder`."""
        self.folder = folder.absolute()
        self.name = remote.url if remote else str(self.folder)
        self._remote: Callable[[], Mapping[str, RemoteRun]] = lambda: remote.runs if remote else {}
        self.price = price
        self._readers: dict[str, RunReader] = {}
        self._looked = -1e9
        self._lock = threading.Lock()

    def _found(self) -> dict[str, RunReader]:
        """The runs that there are now, by id: the path below the folder, or `.` for the folder itself."""
        with self._lock:
            if time.monotonic() - self._looked > LOOK_SECONDS:
                paths = {path.relative_to(self.folder).as_posix(): path for path in find_runs(self.folder)}
                self._readers = {
                    id: self._readers.get(id) or RunReader(id, path, self._remote().get(id))
                    for id, path in paths.items()
                }
                self._looked = time.monotonic()
            return self._readers

    @contextlib.contextmanager
    def _run(self, id: str) -> "Any":
        reader = self._found().get(id)
        if reader is None:
            raise UnknownRun(f"run = {id!r}: there is no such run in {self.name} now")
        with reader.lock:
            yield reader

    # All runs

    def runs(self) -> list[RunLine]:
        """The runs, those that were seen last first."""
        lines = [self._line(reader) for reader in self._found().values()]
        return sorted(lines, key=lambda line: (line.age is None, line.age or 0.0, line.id))

    def _line(self, reader: RunReader) -> RunLine:
        with reader.lock:
            try:
                shown, _ = reader.overview()
            except DamagedFile as error:
                return RunLine(reader.id, reader.name, damaged=str(error))
            last = reader.view.run.last_active()
        curve = shown.curves[0] if shown.curves else None
        return RunLine(
            id=reader.id,
            path=reader.name,
            command=shown.command,
            state=shown.state,
            step=shown.step,
            max_steps=shown.max_steps,
            label=curve.label if curve else None,
            newest=curve.newest if curve else None,
            age=None if last is None else max(time.time() - last, 0.0),
            findings=list(dict.fromkeys(finding.rule for finding in shown.findings)),
            resume=shown.resume,
        )

    def pulse(self, run: str) -> dict[str, Any]:
        """Something that changes when the run does, and whether it is going on."""
        with self._run(run) as reader:
            return {"stamp": reader.view.stamp(), "alive": reader.view.run.is_locked()}

    # One run

    def overview(self, run: str) -> dict[str, Any]:
        """The run at a glance; its curves without their points, and the stamp that `pulse` had before it."""
        with self._run(run) as reader:
            shown, stamp = reader.overview()
            labels = curves.labels_of(shown.command, reader.rows())
            config = reader.view.known_config()
        found = dataclasses.asdict(dataclasses.replace(shown, curves=[]))
        return {
            **found,
            "id": run,
            "path": reader.name,
            "stamp": stamp,
            "curves": [{"key": key, "label": label} for key, label in labels.items()],
            "newest": {curve.key: curve.newest for curve in shown.curves},
            "config": config or {},
        }

    def keys(self, run: str) -> list[str]:
        """The metrics that the run has."""
        with self._run(run) as reader:
            return reader.kept("keys", lambda: curves.keys_of(reader.rows()))

    def points(
        self,
        run: str,
        keys: Sequence[str],
        axis: curves.Axis = "step",
        first: float | None = None,
        last: float | None = None,
        most: int = curves.MOST_POINTS,
    ) -> list[curves.Points]:
        """The curves of these metrics, between `first` and `last` on the axis."""
        with self._run(run) as reader:
            rows = list(reader.rows())
            labels = curves.labels_of(reader.view.command(), rows)
        return curves.points_of(rows, keys, axis, first=first, last=last, labels=labels, most=most)

    def row(self, run: str, step: int) -> dict[str, Any]:
        """The row of metrics.jsonl of a step; empty if there is none."""
        with self._run(run) as reader:
            return next((row for row in reversed(reader.rows()) if row["step"] == step), {})

    def evaluations(self, run: str) -> list[evaluations.EvaluationResults]:
        """The results of all evaluations and validations."""
        with self._run(run) as reader:
            return evaluations.evaluations_of(reader.view.run, reader.view.evals())

    def flips(self, run: str, name: str, before: int, after: int) -> dict[str, Any]:
        """Which problems of an evaluation went from wrong to right and back between two steps."""
        with self._run(run) as reader:
            found = evaluations.flips_of(reader.view.run, reader.view.known_config(), name, before, after)
        return {
            **dataclasses.asdict(found),
            **{key: [_flip(one) for one in getattr(found, key)] for key in ("gained", "lost")},
        }

    # Rollouts

    def rollouts(self, run: str, query: RolloutQuery, begin: int = 0, count: int = 50) -> dict[str, Any]:
        """A page of the rollouts that a query selects, and the rewards of all of them as a histogram."""
        with self._run(run) as reader:
            found: FoundRollouts = reader.index.find(query, begin, count)
            rows = _whole(reader.index.kept, found.keys, answers.LISTED)
            about = {"steps": _ends(reader.index.steps()), "environments": reader.index.environments()}
        return {
            **dataclasses.asdict(found),
            **about,
            "rows": [answers.listed(row, query.text) for row in rows],
        }

    def prompts(self, run: str, step: int) -> dict[str, Any]:
        """The prompts of a step with the rewards of their answers, and the steps before and after it."""
        with self._run(run) as reader:
            kept = reader.index.kept
            steps, rows = kept.steps(), answers.rows_of_step(kept, step)
        return {
            "step": step,
            "prompts": answers.prompts_of(rows),
            "before": max((one for one in steps if one < step), default=None),
            "after": min((one for one in steps if one > step), default=None),
            "kept": _ends(steps),
        }

    def group(self, run: str, step: int, place: int) -> dict[str, Any]:
        """The answers to one prompt side by side, with advantages, and their conversations."""
        with self._run(run) as reader:
            kept = reader.index.kept
            rows = answers.rows_of_step(kept, step)
            config = reader.view.known_config()
            own = [row for row in rows if row["place"] == place]
            keys = [(step, place, row["sample"]) for row in own]
            whole = _whole(kept, keys, SCHEMA.names)
        same = [row for row in rows if own and row["environment"] == own[0]["environment"]]
        values, note = answers.advantages(config, same)
        return {
            "step": step,
            "place": place,
            "problem": own[0]["problem"] if own else None,
            "environment": own[0]["environment"] if own else None,
            "prompt": answers.beginning(own[0].get("prompt") if own else ""),
            "advantages": note,
            "flat": answers.is_flat([row["reward"] for row in own]),
            "answers": [_answer(row, values.get((place, row["sample"]))) for row in whole],
            "places": [prompt.place for prompt in answers.prompts_of(rows)],
        }

    def conversation(
        self, run: str, step: int, place: int, sample: int, whole: bool = False
    ) -> dict[str, Any]:
        """One rollout with all its turns. whole: with texts of any length."""
        with self._run(run) as reader:
            rows = _whole(reader.index.kept, [(step, place, sample)], SCHEMA.names)
        if not rows:
            raise UsageError(f"there is no rollout {step}/{place}/{sample} (step, place, sample) any more")
        return {**_answer(rows[0], None, whole), "prompt": answers.beginning(rows[0]["prompt"], whole)}

    def tokens(self, run: str, step: int, place: int, sample: int, turn: int = 0) -> dict[str, Any]:
        """The sampled tokens of a turn."""
        with self._run(run) as reader:
            rows = _whole(reader.index.kept, [(step, place, sample)], SCHEMA.names)
            decoder, trained = reader.decoder(), reader.trained(step)
        if not rows or not 0 <= turn < len(rows[0]["turns"] or []):
            raise UsageError(f"there is no turn {turn} of rollout {step}/{place}/{sample}")
        return answers.tokens_of(rows[0], turn, decoder, trained)

    def discarded(self, run: str) -> dict[str, Any]:
        """Answers that nothing was learned from, by reason, with what they have cost."""
        with self._run(run) as reader:
            left = reader.index.refresh()
            summary = None
            with contextlib.suppress(CheckpointError):
                summary = _summary(reader)
            reasons = {row["place"]: str(row["reason"]) for row in summary.failed} if summary else {}
            groups, totals = accounts.discarded(reader.index, reasons)
        tries = accounts.ledger_account(summary, 0).tries if summary else {}
        return {"groups": groups, "totals": totals, "left": left, "tries": tries}

    # Accounts

    def account(self, run: str) -> accounts.LedgerAccount | None:
        """The ledger's account of all prompts; None if the run has no ledger.

        Raises:
            CheckpointError: the ledger is damaged.
        """
        with self._run(run) as reader:
            if not reader.view.run.ledger.exists():
                return None
            rows = reader.rows()
            return accounts.ledger_account(_summary(reader), rows[-1]["step"] if rows else 0)

    def checkpoints(self, run: str) -> dict[str, Any]:
        """The checkpoints of a run, and its branches."""
        with self._run(run) as reader:
            config, history = reader.view.known_config(), reader.view.history()
            where, attempt = reader.steps_name(), reader.view.attempt()
            known = (where, config, attempt.id if attempt else "", history)
            found = reader.kept("checkpoints", lambda: accounts.checkpoints(reader.steps(), *known))
        return {**found, "branches": accounts.branches(found["rows"])}

    def goodput(self, run: str) -> dict[str, Any]:
        """What became of the run's time and tokens, and what they have cost if an hour has a price."""
        with self._run(run) as reader:
            return accounts.goodput(reader.view, self.price)

    # Events

    def timeline(self, run: str, last: int = 500) -> dict[str, Any]:
        """The newest `last` steps on the clock, with what happened meanwhile and when it was saved."""
        with self._run(run) as reader:
            rows, history = list(reader.rows()), list(reader.view.history())
            saves = reader.kept("saves", lambda: _saves(reader.view.checkpoints()))
            found = events.timeline(rows, history, reader.view.spans(), saves, last)
            shot = reader.view.snapshot()
        roles = {name: {"state": role.state, "doing": role.doing} for name, role in shot.roles.items()}
        return {**found, "total": len(rows), "now": shot.time, "alive": shot.locked, "roles": roles}

    def logs(self, run: str) -> dict[str, Any]:
        """The logs of a run, and what they report as wrong."""
        with self._run(run) as reader:
            folder = reader.view.run.logs
        return {"files": events.log_files(folder), "errors": events.log_errors(folder)}

    def log(self, run: str, name: str, before: int | None = None) -> events.LogPage:
        """The end of a log, or what ends at byte `before`."""
        with self._run(run) as reader:
            folder = reader.view.run.logs
        return events.log_page(folder, name, before)


def _summary(reader: RunReader) -> Any:
    run = reader.view.run
    return reader.kept(
        "ledger", lambda: read_summary(run.ledger, immutable=is_quiet(run)), seconds=LEDGER_SECONDS
    )


def _whole(kept: KeptRollouts, keys: Sequence[tuple[int, int, int]], columns: Sequence[str]) -> list[Row]:
    """These rollouts, as far as their files can be read."""
    try:
        return whole_rows(kept, keys, columns)
    except DamagedFile:
        found: list[Row] = []
        for step in dict.fromkeys(key[0] for key in keys):
            with contextlib.suppress(DamagedFile):
                found += whole_rows(kept, [key for key in keys if key[0] == step], columns)
        return found


def _answer(row: Row, advantage: float | None, whole: bool = False) -> dict[str, Any]:
    few = {key: value for key, value in row.items() if key not in ("turns", "prompt", "text")}
    text = answers.beginning(row.get("text"), whole)
    return {**few, "advantage": advantage, "text": text, "turns": answers.conversation(row, whole=whole)}


def _flip(flip: evaluations.Flip) -> dict[str, Any]:
    texts = {key: answers.cell(getattr(flip, key)) for key in ("question", "text_before", "text_after")}
    return {**dataclasses.asdict(flip), **texts}


def _ends(steps: Sequence[int]) -> tuple[int, int] | None:
    return (steps[0], steps[-1]) if steps else None


def _models(view: RunView) -> list[Path]:
    """Folders with the run's tokenizer: that of the newest checkpoint, or the model that it began with."""
    folders, found = StepFolders(view.checkpoints()), list[Path]()
    with contextlib.suppress(UsageError, OSError):
        found += [folders.folder(step) / "model" for step in folders.steps()[-1:]]
    with contextlib.suppress(DamagedFile):
        name = as_object(as_object(view.config()).get("model")).get("name")
        found += [Path(name)] if isinstance(name, str) else []
    return found


def _saves(folder: Path) -> list[Mapping[str, Any]]:
    """When each step that exists was committed."""
    folders, found = StepFolders(folder), list[Mapping[str, Any]]()
    with contextlib.suppress(UsageError, OSError):
        for step in folders.steps():
            with contextlib.suppress(CheckpointError, ValueError):
                created = datetime.datetime.fromisoformat(folders.manifest(step).created)
                found.append({"step": step, "time": created.timestamp()})
    return found
