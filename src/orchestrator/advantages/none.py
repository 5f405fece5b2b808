"""No advantages, for distillation."""

from cairn.orchestrator.rollouts import AnswerGroup


class NoAdvantage:
    """0 for each answer: all that is learned comes from a teacher's logprobs."""

    compares = False

    def __call__(self, group: AnswerGroup) -> list[float]:
        return [0.0] * len(group.rollouts)
