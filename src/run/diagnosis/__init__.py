"""What a run's rows say of its learning: rules, each with a threshold, a sentence and what to do about it.

`findings` is a function of rows and settings, without a process, a clock or a file. `Diagnosis` follows a run
that grows. Whoever shows a run asks here, so that the terminal, a command and a page say the same.
"""

from cairn.run.diagnosis.drift import EntropyCollapse, EvaluationFalls, LargestGaps, Overfitting, PolicyDrift
from cairn.run.diagnosis.rule import Diagnosis, DiskRoom, Finding, Rule, RuleInput, findings
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
    OtherStart,
    SlowRewards,
    SummedScores,
    UnlearnedRecords,
)
from cairn.run.diagnosis.time_use import DiskFills, IdleRanks, ManyRestarts, SlowSaves, StaleAnswers, WhoWaits

RULES: tuple[Rule, ...] = (
    GivenUp(),
    FailedAnswers(),
    NoSpread(),
    NothingLearned(),
    AnswersCutOff(),
    CutSamples(),
    UnlearnedRecords(),
    MalformedCalls(),
    NoCalls(),
    SummedScores(),
    EntropyCollapse(),
    PolicyDrift(),
    LargestGaps(),
    EvaluationFalls(),
    Overfitting(),
    WhoWaits(),
    StaleAnswers(),
    SlowRewards(),
    OtherPushes(),
    OtherStart(),
    IdleRanks(),
    SlowSaves(),
    ManyRestarts(),
    DiskFills(),
)
"""In the order in which what they find is reported."""

__all__ = ["RULES", "Diagnosis", "DiskRoom", "Finding", "Rule", "RuleInput", "findings"]
