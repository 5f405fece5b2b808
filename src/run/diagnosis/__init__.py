"""What a run's rows say of its learning: rules, each with a threshold, a sentence and what to do about it.

`findings` is a function of rows and settings, without a process, a clock or a file. `Diagnosis` follows a run
that grows. Whoever shows a run asks here, so that the terminal, a command and a page say the same.
"""

from cairn.run.diagnosis.rule import Diagnosis, Finding, Rule, RuleInput, findings
from cairn.run.diagnosis.rules import (
    AnswersCutOff,
    CutSamples,
    FailedAnswers,
    GivenUp,
    MalformedCalls,
    NoCalls,
    NoSpread,
    NothingLearned,
    OtherPushes,
    SlowRewards,
    SummedScores,
    UnlearnedRecords,
)

RULES: tuple[Rule, ...] = (
    GivenUp(),
    FailedAnswers(),
    NothingLearned(),
    NoSpread(),
    AnswersCutOff(),
    CutSamples(),
    UnlearnedRecords(),
    MalformedCalls(),
    NoCalls(),
    SummedScores(),
    SlowRewards(),
    OtherPushes(),
)
"""In the order in which what they find is told."""

__all__ = ["RULES", "Diagnosis", "Finding", "Rule", "RuleInput", "findings"]
