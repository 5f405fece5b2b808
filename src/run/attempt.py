"""An attempt at a run, the roles at work on it, and how it ended."""

from dataclasses import dataclass

from cairn.run.messages import PolicyName


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
