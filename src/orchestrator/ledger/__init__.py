"""The ledger records what became of each prompt, so that every prompt is trained on exactly once.

It is one SQLite file in the run directory, written by one process. A prompt and the tokens sampled for it are
kept from when it is issued to a server until a committed checkpoint contains the training on it. One small
row for each batch, each dropped group, and each prompt that is in no batch is kept for ever. The life of a
prompt:

    issued -> partial tokens -> whole answers -> shipped in a batch -> trained, and folded
                             -> dropped, and issued again
"""

from cairn.orchestrator.ledger.ledger import Ledger, LedgerFailed
from cairn.orchestrator.ledger.reading import (
    LedgerContent,
    LedgerSummary,
    LedgerTokens,
    is_quiet,
    read_answers,
    read_ledger,
    read_sampled,
    read_summary,
    read_tokens,
    read_whole_answers,
)
from cairn.orchestrator.ledger.schema import FORMAT, RESTS, SCHEMA, LedgerRun, to_ranges

__all__ = [
    "FORMAT",
    "RESTS",
    "SCHEMA",
    "Ledger",
    "LedgerContent",
    "LedgerFailed",
    "LedgerRun",
    "LedgerSummary",
    "LedgerTokens",
    "is_quiet",
    "read_answers",
    "read_ledger",
    "read_sampled",
    "read_summary",
    "read_tokens",
    "read_whole_answers",
    "to_ranges",
]
