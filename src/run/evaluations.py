"""Results of validations and evaluations that metrics.jsonl has the numbers of, and evals.jsonl lacks."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

VALIDATED = re.compile(r"validation/([^/]+)/loss")
EVALUATED = re.compile(r"eval/([^/]+)/step")


def lost(rows: Iterable[Mapping[str, Any]], evals: Iterable[Mapping[str, Any]]) -> dict[str, list[int]]:
    """The steps whose results are in the rows of metrics.jsonl and not in evals.jsonl, by name.

    A row of SFT has the results of its own step, one of RL those of a policy whose evaluation ended then.
    """
    there = {(row.get("name"), row.get("step")) for row in evals}
    found: dict[str, set[int]] = {}
    for row in rows:
        for key, value in row.items():
            if match := VALIDATED.fullmatch(key):
                name, step = match[1], row["step"]
            elif match := EVALUATED.fullmatch(key):
                name, step = match[1], int(value)
            else:
                continue
            if (name, step) not in there:
                found.setdefault(name, set()).add(step)
    return {name: sorted(steps) for name, steps in found.items()}
