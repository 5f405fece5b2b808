"""The kinds of runs, and what differs between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from cairn.config.inference import InferenceConfig
from cairn.config.preferences import DPOConfig, RewardConfig
from cairn.config.rl import SERVER, RLConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.config.trainer import SFTConfig, TrainerBase
from cairn.run.errors import UsageError

RunConfig = SFTConfig | DPOConfig | RewardConfig | TrainerConfig | RLConfig


@dataclass(frozen=True)
class RunKind:
    """One kind of run.

    config: its configuration class. needs: settings that must be given; of a|b, one is
    enough. roles: those that it starts (a server, or several, only if none is given).
    parts: what a checkpoint must have so that the run can resume from it. epochs_of: what an epoch consists
    of. sections: whether its configuration has one section per role.
    """

    command: str
    config: type[RunConfig]
    needs: tuple[str, ...]
    roles: tuple[str, ...]
    parts: tuple[str, ...]
    epochs_of: Literal["records", "prompts"]
    sections: bool = False

    def of(self, role: str, config: RunConfig) -> Any:
        """The configuration of a role."""
        return getattr(config, role) if self.sections else config

    def servers(self, config: RunConfig) -> Mapping[str, InferenceConfig]:
        """The configuration of each server that the run starts itself, by the name of its role."""
        return self.of(SERVER, config).each if SERVER in self.roles else {}

    def started(self, config: RunConfig) -> tuple[str, ...]:
        """The roles that it starts with this configuration, the servers first."""
        return (*self.servers(config), *(role for role in self.roles if role != SERVER))

    def trainer(self, config: RunConfig) -> TrainerBase:
        """The configuration of the trainer."""
        return self.of("trainer", config)

    def with_trainer(self, config: RunConfig, trainer: TrainerBase) -> RunConfig:
        """The configuration with another one of the trainer."""
        changed: Any = config.model_copy(update={"trainer": trainer}) if self.sections else trainer
        return changed

    def with_sources(self, config: RunConfig, sources: Mapping[str, str]) -> RunConfig:
        """The configuration with other sources of the models that score batches, by the column's name."""
        trainer = self.trainer(config).with_sources(sources)
        if not self.sections:
            return cast(RunConfig, trainer)
        orchestrator = self.of("orchestrator", config).model_copy(update={"teachers": trainer.teachers})
        return config.model_copy(update={"trainer": trainer, "orchestrator": orchestrator})

    def flags(self, role: str) -> str:
        """The prefix of a role's flags."""
        return f"--{role}." if self.sections else "--"


OF_RECORDS = ("model.name", "data.name|data.sets")
"""What must be given for training on records."""
KINDS = {
    kind.command: kind
    for kind in (
        RunKind("sft", SFTConfig, OF_RECORDS, ("trainer",), ("trainer",), "records"),
        RunKind("dpo", DPOConfig, OF_RECORDS, ("trainer",), ("trainer",), "records"),
        RunKind("reward", RewardConfig, OF_RECORDS, ("trainer",), ("trainer",), "records"),
        RunKind(
            "trainer", TrainerConfig, ("model.name",), ("trainer",), ("trainer", "orchestrator"), "prompts"
        ),
        RunKind(
            "rl",
            RLConfig,
            ("model.name",),
            (SERVER, "trainer", "orchestrator"),
            ("trainer", "orchestrator"),
            "prompts",
            sections=True,
        ),
    )
}
"""By the name of the command that starts the run, as in roles.json."""


def kind_of(command: str) -> RunKind:
    """The kind of the run that `command` has started, according to roles.json.

    Raises:
        UsageError: this version of Cairn has no such command.
    """
    if command not in KINDS:
        raise UsageError(f"the run was started by {command!r}, which is not one of {', '.join(KINDS)}")
    return KINDS[command]
