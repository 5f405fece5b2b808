"""Where a run's prompts come from: its environments, each with its settings and its advantage."""

from collections.abc import Sequence
from dataclasses import dataclass

from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.advantages import Advantage, make_advantage
from cairn.orchestrator.environments import AskedEnvironment, ask, make_environment
from cairn.orchestrator.order import Portion
from cairn.orchestrator.overlong import Overlong, make_overlong


@dataclass(frozen=True)
class PromptSource:
    """One environment of the run. `config`: the settings by which its prompts are answered."""

    config: OrchestratorConfig
    weight: float
    environment: AskedEnvironment
    advantage: Advantage
    overlong: Overlong

    @property
    def label(self) -> str:
        """What messages, metrics and rollouts call it."""
        return self.environment.name

    @property
    def portion(self) -> Portion:
        """What the order of the prompts knows of it."""
        samples = self.config.samples_per_prompt
        return Portion(self.label, self.environment.problems, self.weight, samples)


def make_sources(config: OrchestratorConfig) -> list[PromptSource]:
    """The run's environments, in the order of the configuration.

    Raises:
        BadEnvironment: an environment can't be made.
        BadExtension: an advantage can't be made.
    """
    weights = [one.weight for one in config.environments] or [1.0]
    return [
        PromptSource(
            one,
            weight,
            ask(make_environment(one.environment), one),
            make_advantage(one.advantage),
            make_overlong(one),
        )
        for one, weight in zip(config.of_environments(), weights, strict=True)
    ]


def problems_of(sources: Sequence[PromptSource]) -> int:
    """The number of problems of all environments."""
    return sum(source.environment.problems for source in sources)
