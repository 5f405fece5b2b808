"""What the trainer and the orchestrator tell each other, each message as a frozen record.

All of them lie in files: announcements and probes below `weights/`, headers in the batches' files, requests
to stop in `stop.json`. `to_json` is what is written there. What is read is checked field by field, so that a
message which lacks something, or has another type in its place, is noticed at once.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from cairn.run.files import parse_json, read_json, write_json


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
        allowed = max(ROUNDING.get(kind, 0.0) for kind in (dtype, self.dtype))
        allowed *= 1 + sum(map(abs, self.logprobs)) / len(apart)
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
