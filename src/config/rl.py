"""Configuration of a whole RL run: the roles' own, and what they share."""

from typing import Any, ClassVar

from pydantic import Field, model_validator

from cairn.config.ckpt import CkptConfig
from cairn.config.inference import InferenceConfig
from cairn.config.model import ModelConfig
from cairn.config.orchestrator import OrchestratorConfig
from cairn.config.supervision import SupervisionConfig
from cairn.config.trainer import TrainerConfig

RUN = ("model", "seed", "max_steps", "output_dir", "ckpt", "dry_run")

# Which of the run's shared values each role has a field for.
SHARED = {
    "trainer": (
        "model",
        "seed",
        "max_steps",
        "output_dir",
        "ckpt",
        "self_check",
        "dry_run",
        *SupervisionConfig.model_fields,
    ),
    "orchestrator": ("model", "seed", "max_steps", "output_dir", "ckpt", "self_check", "dry_run"),
    "inference": ("model", "dry_run"),
}


class RLConfig(SupervisionConfig):
    """Reinforcement learning: a trainer, an orchestrator, and a server unless one is running already."""

    shared: ClassVar[dict[str, tuple[str, ...]]] = SHARED

    model: ModelConfig = ModelConfig()
    seed: int = Field(0, ge=0)
    """Seed of every random draw of the run."""
    max_steps: int = Field(100, ge=1)
    """Optimiser steps after which the run is done."""
    output_dir: str = "outputs/rl"
    """Folder for everything that the run writes."""
    ckpt: CkptConfig | None = None
    self_check: bool = True
    """Refuse a model that is not scored alike alone, in micro-batches and by servers; false goes on."""
    trainer: TrainerConfig = TrainerConfig()
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    inference: InferenceConfig = InferenceConfig()
    dry_run: bool = False
    """Print the resolved configuration and exit."""

    @model_validator(mode="before")
    @classmethod
    def _set_shared_values_once(cls, data: Any) -> Any:
        """Hand the run's value, or the one that a role's file sets, to every role."""
        if not isinstance(data, dict):
            return data
        roles = {role: dict(data.get(role) or {}) for role in SHARED}
        shared: dict[str, Any] = {}
        for key in SHARED["trainer"]:
            for owner in [*roles.values(), data]:  # the run's own value comes last and wins
                if key in owner:
                    shared[key] = _merge(shared.get(key), owner[key])
        for role, keys in SHARED.items():
            roles[role].update({key: shared[key] for key in keys if key in shared})
        return {**data, **shared, **roles}


def _merge(low: Any, high: Any) -> Any:
    if isinstance(low, dict) and isinstance(high, dict):
        return {**low, **{key: _merge(low.get(key), value) for key, value in high.items()}}
    return high
