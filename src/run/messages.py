"""What the trainer and the orchestrator tell each other, each message as a frozen record; and the policy
versions in transit between them.

All of them lie in files: announcements and probes below `weights/`, headers in the batches' files, requests
to stop in `stop.json`. `to_json` is what is written there. What is read is checked field by field, so that a
message which lacks something, or has another type in its place, is noticed at once.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from cairn.run.files import DamagedFile, entries, parse_json, read_json, read_note, write_json


@dataclass(frozen=True)
class Message:
    """What every message has."""

    def to_json(self) -> dict[str, Any]:
        """Its fields, as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The message whose JSON this is. Keys that it does not know are left out.

        Raises:
            ValueError: it is no JSON, or lacks a field, or has one of another type.
        """
        return parse_json(text, cls)


@dataclass(frozen=True)
class PolicyName:
    """The policy of a run's branch after so many optimiser steps; servers know it as `run_id:branch:step`."""

    run_id: str
    branch: str
    step: int

    def __str__(self) -> str:
        return f"{self.run_id}:{self.branch}:{self.step}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The policy that is called so.

        Raises:
            ValueError: it is no policy's name.
        """
        try:
            run_id, branch, step = text.rsplit(":", 2)
            return cls(run_id, branch, int(step))
        except ValueError:
            raise ValueError(f"{text!r} is no policy's name: run_id:branch:step") from None


# From the orchestrator to the trainer


@dataclass(frozen=True)
class ShippedBatch:
    """What is known of a batch for ever: its row in the ledger, which its file's header repeats.

    step: the optimiser step that it is for. places: of its prompts in the run's prompt order, as ranges with
    both ends included. digest: of what is learned from. oldest_step: of the oldest policy that any of its
    tokens come from.
    """

    step: int
    places: list[list[int]]
    samples: int
    tokens: int
    digest: str
    oldest_step: int

    @property
    def problems(self) -> int:
        """Number of prompts in it."""
        return sum(last - first + 1 for first, last in self.places)


@dataclass(frozen=True)
class BatchHeader(Message):
    """Which step of which run a batch is for, and what the ledger says of it.

    attempt: the one that shipped it. version: the name of the newest policy that any token comes from.
    problems: the environment's number of each prompt, in the order of the batch.
    """

    run_id: str
    branch: str
    attempt: str
    step: int
    version: str
    problems: list[int]
    ledger: ShippedBatch


@dataclass(frozen=True)
class HandOver(Message):
    """That the servers sleep, so that the GPU which they share with the trainer is the trainer's.

    It holds until the trainer announces the policy of step `until`; with None, until the attempt ends.
    """

    attempt: str
    until: int | None


# From the trainer to the orchestrator


@dataclass(frozen=True)
class Beginning(Message):
    """That the trainer holds the policy that `attempt` starts from, having read and verified all of it.

    published: whether servers get it from `weights/v<step>`, where it has the data type in which policies are
    published, rather than from the checkpoint.
    """

    attempt: str
    published: bool


@dataclass(frozen=True)
class Announcement(Message):
    """That the policy after `version` steps is there to be served, in `weights/v<version>`.

    `save`: that step is a checkpoint, so every role saves its part. `last`: the run ends there; a run that is
    asked to stop while its trainer waits for the next batch announces its newest version again to say so.
    """

    attempt: str
    version: int
    save: bool
    last: bool


ROUNDING = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}
"""How far apart server and trainer may be on average, per unit of 1 + |logprob|, by the coarser data type."""


def rounding(dtypes: Iterable[str], logprobs: Sequence[float]) -> float:
    """The mean difference between two computations of these logprobs, in these data types, that rounding may
    make."""
    return max((ROUNDING.get(kind, 0.0) for kind in dtypes), default=0.0) * (
        1 + sum(map(abs, logprobs)) / len(logprobs)
    )


@dataclass(frozen=True)
class Probe(Message):
    """A few tokens and the trainer's logprobs of them: by these a server proves that it serves that policy.

    token_ids, and the logprob of each but the first under the policy, computed in `dtype`.
    """

    token_ids: list[int]
    logprobs: list[float]
    dtype: str

    def difference(self, logprobs: list[float], dtype: str) -> str | None:
        """How a server's logprobs of these tokens, or the first of them, differ; None: by rounding only."""
        apart = [abs(theirs - ours) for theirs, ours in zip(logprobs, self.logprobs, strict=False)]
        mean = sum(apart) / len(apart)
        allowed = rounding((dtype, self.dtype), self.logprobs[: len(apart)])
        if mean <= allowed:  # and not NaN
            return None
        return f"by {mean:.2g} on average and {max(apart):.2g} at most, where rounding makes {allowed:.2g}"


PROBE = "probe.json"
"""In the folder of a policy version."""


def write_probe(folder: Path, probe: Probe) -> None:
    """Put the probe into the folder of its policy."""
    write_json(folder / PROBE, probe.to_json())


def read_probe(folder: Path) -> Probe | None:
    """The probe in a policy's folder, or None if there is none.

    Raises:
        DamagedFile: it can't be read.
    """
    return read_json(folder / PROBE, Probe)


DELTA = "delta.json"
"""In the folder of a policy version that holds what has changed, in place of tensors."""


@dataclass(frozen=True)
class DeltaNote(Message):
    """That a version's folder holds what its tensors differ in from those of the version in the folder `base`
    beside it, in one file for each of `ranks` ranks. The digests are of the two policies' checksums.
    """

    base: str
    base_digest: str
    digest: str
    ranks: int


def write_delta_note(folder: Path, note: DeltaNote) -> None:
    """Put the note into the folder of its policy."""
    write_json(folder / DELTA, note.to_json())


def read_delta_note(folder: Path) -> DeltaNote | None:
    """The note in a policy's folder, or None if the folder holds no delta.

    Raises:
        DamagedFile: it can't be read, or names no folder of a version.
    """
    note = read_json(folder / DELTA, DeltaNote)
    if note is not None and not FOLDER.fullmatch(note.base):
        raise DamagedFile(f"{folder / DELTA}: {note.base!r} is not the name of a version's folder")
    return note


# From any role to the trainer, which heeds it at the next step boundary


@dataclass(frozen=True)
class StopRequest(Message):
    """That the run is to save and stop, and why."""

    reason: str


@dataclass(frozen=True)
class Deadline(Message):
    """When a run that is to stop must have ended, in seconds since 1970."""

    time: float


# An attempt at a run, the roles at work on it, and how it ended.


@dataclass(frozen=True)
class Attempt:
    """One start of a run, first or resumed; every message between roles carries its id."""

    run_id: str
    number: int
    command: str
    """The command that started it: sft, rl or trainer."""
    start_step: int
    """Optimiser steps that were done before this attempt."""
    resume_from: str | None
    """The step_N folder that every role goes on from; None starts fresh."""
    branch: str
    """The branch of the run that its checkpoints belong to."""
    publishes_first: bool = False
    """Whether the trainer publishes the policy that a new run begins with; else servers get its folder."""
    token: str = ""
    """Tells it from every other attempt, also from one on a machine that knows nothing of this one."""

    @property
    def id(self) -> str:
        """Names the attempt in messages."""
        return f"{self.run_id}:{self.number}"

    @property
    def owner(self) -> str:
        """Names the attempt to other machines, as the owner of a remote prefix."""
        return f"{self.id}:{self.token}" if self.token else self.id

    def version(self, step: int) -> str:
        """The name under which a server knows the policy after `step` optimiser steps."""
        return str(PolicyName(self.run_id, self.branch, step))


@dataclass(frozen=True)
class Outcome:
    """How training ended."""

    step: int
    stopped: str | None
    """Why it stopped before its last step, if it did."""
    saved: bool
    """Whether the last step's checkpoint exists."""


@dataclass(frozen=True)
class RoleEntry:
    """What roles.json says of one role. `state`: running, waiting, done, stopped or failed."""

    role: str
    pid: int
    host: str
    attempt: int
    state: str


# Policy versions in transit: published by the trainer, announced to the orchestrator, loaded by servers.
# Where trainer and servers share a GPU, also whose turn it is.


NOTE = re.compile(r"v([0-9]+)\.json")
FOLDER = re.compile(r"v([0-9]+)")
OURS = re.compile(r"\.spare|v[0-9]+(\.json)?|\.v[0-9]+\..*|(hand_over|beginning)\.json")

WEIGHT_SOURCE = "source.json"
"""In a policy version's folder, in place of its tensors: where servers get them."""


STORED = "stored.json"


@dataclass(frozen=True)
class StoredVersion(Message):
    """In a policy version's folder, beside its files: that an object store has them, too, for servers that do
    not see the folder.
    """

    url: str


class PolicyVersions:
    """The folder `weights/` of a run: Hugging Face folders `v<step>/`, each announced by `v<step>.json`."""

    def __init__(self, path: Path):
        self.path = path
        self._hand_over = path / "hand_over.json"
        self._beginning = path / "beginning.json"
        self.spare = path / ".spare"
        """A version's folder that nobody needs any more, if it is there."""

    def folder(self, step: int) -> Path:
        """The Hugging Face directory of the policy after `step` steps, while it is in transit."""
        return self.path / f"v{step}"

    def stored(self) -> list[StoredVersion]:
        """The versions of which an object store has the files."""
        folders = (path for path in entries(self.path, "") if FOLDER.fullmatch(path.name))
        notes = (read_note(path / STORED, StoredVersion) for path in folders)
        return [note for note in notes if note is not None]

    def begin(self, attempt: Attempt, *, published: bool) -> None:
        """Say that the trainer holds the policy that the attempt starts from; see `Beginning`."""
        write_json(self._beginning, Beginning(attempt.id, published).to_json())

    def beginning(self, attempt: Attempt) -> Beginning | None:
        """What the trainer of this attempt has said of the policy that it starts from, if it has."""
        message = read_note(self._beginning, Beginning)
        return message if message and message.attempt == attempt.id else None

    def announce(self, attempt: Attempt, step: int, *, save: bool, last: bool) -> None:
        """Say that the policy after `step` steps lies in `folder(step)`; see `Announcement`."""
        message = Announcement(attempt.id, step, save, last)
        write_json(self._note(step), message.to_json())

    def announced(self, attempt: Attempt, step: int) -> Announcement | None:
        """The announcement of version `step` by this attempt, if it is there yet."""
        message = read_note(self._note(step), Announcement)
        return message if message and message.attempt == attempt.id else None

    def all_announced(self, attempt: Attempt) -> list[int]:
        """The versions that this attempt has announced and not yet removed, oldest first."""
        return sorted(step for step in self._steps() if self.announced(attempt, step))

    def forget_before(self, step: int) -> None:
        """Remove the policy versions before `step`, which no server will be given any more.

        Those stay that the version of `step` is made of, if its folder holds a delta.

        One of their folders becomes `spare`, for the trainer to write a new version into: memory that is in
        the page cache already is several times as fast to write as new memory.
        """
        chain = set(self._chain(step))
        for older in self._steps():
            if older < step:
                if (folder := self.folder(older)) not in chain:
                    with contextlib.suppress(OSError):  # there is one already, or nothing to keep
                        os.rename(folder, self.spare)
                    shutil.rmtree(folder, ignore_errors=True)
                self._note(older).unlink(missing_ok=True)
        for path in entries(self.path, ""):  # the policy that the attempt started from has no note
            number = FOLDER.fullmatch(path.name)
            if number and int(number[1]) < step and path not in chain and any(path.glob("*.safetensors")):
                shutil.rmtree(path, ignore_errors=True)

    def _chain(self, step: int) -> Iterator[Path]:
        """The folders of earlier versions that a version's delta is relative to, newest first."""
        folder = self.folder(step)
        while note := read_note(folder / DELTA, DeltaNote):
            base = folder.with_name(note.base)
            if not _is_earlier(base, folder):
                return
            yield (folder := base)

    # Whose turn it is on a GPU that servers share with the trainer. The orchestrator writes the note when all
    # servers sleep, and removes it before it wakes them. As a process may die before it removes the note, the
    # announcement of the policy that the trainer was to make ends the trainer's turn as well.

    def hand_over(self, attempt: Attempt, until: int | None) -> None:
        """Say that the servers sleep until the policy of step `until` is announced; see `HandOver`."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self._hand_over, HandOver(attempt.id, until).to_json())

    def take_back(self) -> None:
        """End the trainer's turn: the servers are about to be woken."""
        self._hand_over.unlink(missing_ok=True)

    def handed_over(self, attempt: Attempt) -> HandOver | None:
        """The newest hand-over of this attempt, if it was not taken back; the turn may have ended."""
        message = read_note(self._hand_over, HandOver)
        return message if message and message.attempt == attempt.id else None

    def trainers_turn(self, attempt: Attempt) -> HandOver | None:
        """The hand-over that holds now: no server is awake, or is started."""
        message = self.handed_over(attempt)
        if message is None or message.until is None:
            return message
        return message if message.until > max(self.all_announced(attempt), default=-1) else None

    def may_train(self, attempt: Attempt, step: int) -> bool:
        """Whether it is the trainer's turn, to take step `step` among others."""
        turn = self.trainers_turn(attempt)
        return turn is not None and (turn.until is None or step <= turn.until)

    def clear(self) -> None:
        """Remove the versions of an earlier attempt, which nobody waits for any more."""
        if not self.path.is_symlink():
            shutil.rmtree(self.path, ignore_errors=True)
            return
        for path in self.path.iterdir():  # of a link, to memory perhaps, only what is ours
            if OURS.fullmatch(path.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _note(self, step: int) -> Path:
        return self.folder(step).with_suffix(".json")

    def _steps(self) -> Iterator[int]:
        names = (NOTE.fullmatch(path.name) for path in entries(self.path, ".json"))
        return (int(match[1]) for match in names if match)


def _is_earlier(folder: Path, other: Path) -> bool:
    """Whether the folder of one version is that of an earlier step than the folder of another one."""
    steps = [FOLDER.fullmatch(path.name) for path in (folder, other)]
    return steps[0] is not None and steps[1] is not None and int(steps[0][1]) < int(steps[1][1])
