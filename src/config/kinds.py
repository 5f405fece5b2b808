"""The kinds of runs: what the commands that start one differ in."""

from dataclasses import dataclass
from typing import Any, Literal

from cairn.config.rl import RLConfig
from cairn.config.trainer import SFTConfig, TrainerBase, TrainerConfig
from cairn.run.errors import UsageError

RunConfig = SFTConfig | TrainerConfig | RLConfig


@dataclass(frozen=True)
class RunKind:
    """What a command starts.

    config: the class of its configuration. needs: settings without a sensible default. roles: those that it
    starts, a server only where none is running. parts: what a checkpoint must have to be gone on from.
    epochs_of: what an epoch consists of. sections: whether its configuration has a section for each role.
    """

    command: str
    config: type[RunConfig]
    needs: tuple[str, ...]
    roles: tuple[str, ...]
    parts: tuple[str, ...]
    epochs_of: Literal["records", "prompts"]
    sections: bool = False

    def of(self, role: str, config: RunConfig) -> Any:
        """A role's configuration."""
        return getattr(config, role) if self.sections else config

    def trainer(self, config: RunConfig) -> TrainerBase:
        """The trainer's configuration."""
        return self.of("trainer", config)

    def flags(self, role: str) -> str:
        """How the flags of a role's settings begin."""
        return f"--{role}." if self.sections else "--"


KINDS = {
    kind.command: kind
    for kind in (
        RunKind("sft", SFTConfig, ("model.name", "data.name"), ("trainer",), ("trainer",), "records"),
        RunKind(
            "trainer", TrainerConfig, ("model.name",), ("trainer",), ("trainer", "orchestrator"), "prompts"
        ),
        RunKind(
            "rl",
            RLConfig,
            ("model.name",),
            ("inference", "trainer", "orchestrator"),
            ("trainer", "orchestrator"),
            "prompts",
            sections=True,
        ),
    )
}
"""By the command that starts the run, which roles.json names."""


def kind_of(command: str) -> RunKind:
    """The kind of a run that `command` started, by roles.json.

    Raises:
        UsageError: this version has no such command.
    """
    if command not in KINDS:
        raise UsageError(f"the run was started by {command!r}, which is none of {', '.join(KINDS)}")
    return KINDS[command]
