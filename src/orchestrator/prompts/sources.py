"""Where a run's prompts come from: its environments, each with its settings and its advantage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.advantages import Advantage, make_advantage
from cairn.orchestrator.environments import AskedEnvironment, ask, make_environment
from cairn.orchestrator.prompt_order import Portion
from cairn.orchestrator.rollouts import AnswerGroup, Rollout

# What is learned from answers that are cut off by the length limit, or come close to it.


class Overlong:
    """What is learned from answers of an environment that are too long; by default as from all others."""

    def compared(self, group: AnswerGroup) -> AnswerGroup:
        """The group with the rewards by which its answers are compared; none of its answers has failed."""
        return group

    def masks(self, rollout: Rollout) -> bool:
        """Whether nothing is learned from the answer, though its reward counts for its group's advantages."""
        return False


class Mask(Overlong):
    """Nothing is learned from those that are cut off. Source: DAPO, arXiv:2503.14476, section 3.4."""

    def masks(self, rollout: Rollout) -> bool:
        return rollout.finish_reason == "length"


class Shape(Overlong):
    """They lose reward the closer they come to the limit: DAPO's soft overlong punishment (equation 13).

    With the limit m, the buffer b and an answer of n tokens, that is penalty * clip((n - (m - b)) / b, 0, 1);
    an answer that is cut off loses all of the penalty. Of a program, the longest answer of the model counts.
    """

    def __init__(self, limit: int, buffer: int, penalty: float):
        self.limit, self.buffer, self.penalty = limit, buffer, penalty

    def compared(self, group: AnswerGroup) -> AnswerGroup:
        shaped = [
            replace(rollout, reward=reward - self.loss(rollout))
            for rollout, reward in zip(group.rollouts, group.rewards, strict=True)
        ]
        return replace(group, rollouts=shaped)

    def loss(self, rollout: Rollout) -> float:
        """What the answer loses of its reward."""
        if rollout.finish_reason == "length":
            return self.penalty
        answers = rollout.turns or [rollout]
        longest = max(len(answer.token_ids) for answer in answers)
        over = (longest - (self.limit - self.buffer)) / self.buffer
        return self.penalty * min(max(over, 0.0), 1.0)


KINDS: dict[str, Callable[[OrchestratorConfig], Overlong]] = {
    "learn": lambda _: Overlong(),
    "mask": lambda _: Mask(),
    "shape": lambda config: Shape(
        config.sampling.max_tokens, config.overlong.buffer, config.overlong.penalty
    ),
}


def make_overlong(config: OrchestratorConfig) -> Overlong:
    """What the settings of an environment say of its answers that are too long."""
    return KINDS[config.overlong.type](config)


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
