"""Why a vLLM server ended, from its log."""

import re
from dataclasses import dataclass

MODEL_REFUSED = "this model can't be served: "
"""How Cairn's plugin begins what it has against a model."""
OF_THE_MODEL = (
    "ValueError",
    "ValidationError",
    "NotImplementedError",
    "KeyError",
    "AttributeError",
    "TypeError",
)
"""Exceptions of vLLM's that a model, or a setting, raises at every start."""
RAISED = re.compile(r"(?:^|[\s.])([A-Z]\w*(?:Error|Exception)): (\S.*)")
"""Where a traceback names its exception."""
ARGUMENT = re.compile(r"\berror: ((?:unrecognized|argument|ambiguous|the following).*)")
"""What argparse says of a command line."""
CONSEQUENCES = ("Engine core initialization failed", "EngineCore", "cancelled", "Engine process failed")
"""In what follows from another exception."""


@dataclass(frozen=True)
class LogReason:
    """A line of the log, and whether another start would end with the same one."""

    text: str
    is_final: bool


def reason(log: str) -> LogReason | None:
    """The root cause that the log of a server that died names, if it names one."""
    if MODEL_REFUSED in log:
        return LogReason(MODEL_REFUSED + log.partition(MODEL_REFUSED)[2].splitlines()[0].strip(), True)
    if argument := ARGUMENT.search(log):
        return LogReason(argument[1].strip(), True)
    lines = log.splitlines()
    found: list[LogReason] = []
    for number, line in enumerate(lines):
        raised = RAISED.search(line)
        if not raised or any(word in raised[2] for word in CONSEQUENCES) or "WARNING" in line:
            continue
        kind, text = raised[1], raised[2].strip()
        if kind == "ValidationError":  # pydantic's own text follows, and then where to read about it
            text = next(iter(lines[number + 1 : number + 2]), text)
            text = re.sub(r"^.*?\.py:\d+\] ", "", text).strip()
            text = re.sub(r"^Value error, | \[type=.*$", "", text)
        found.append(LogReason(f"{kind}: {text}", kind in OF_THE_MODEL))
    return found[0] if found else None
