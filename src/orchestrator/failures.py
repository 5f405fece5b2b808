"""Why there is no reward: reasons in words, what they have in common, and whether another try may help.

A reason is text from outside: an exception's message, an agent's output. `EnvironmentFailed` makes it clean
when it is raised, so that whatever holds it later can be written to a database, a file or a terminal.
"""

import re
import traceback
from pathlib import Path

UNSCORED = "unscored: "
"""How the reason of an answer begins whose reward is None."""
ANSWER = "; the answer was "
"""What stands between a reason and the answer that it is about."""
SHOWN_KIND = 160
"""Characters of a reason's kind."""
NEVER_PASS = (NameError, ImportError, SyntaxError, NotImplementedError)
"""Exceptions of code that is wrong. Another try raises them again. A KeyError or a TypeError is none of them:
code raises these as well when a judge that is overloaded answers with something else than it should."""
ONLY_MAIN_THREAD = ("signal only works in main thread", "threaded environment")
"""What libraries say that set a time limit by a signal (SIGALRM), as Math-Verify does."""
MAIN_THREAD_HINT = (
    "; signals work in a process's main thread only: set orchestrator.reward_threads = 0, which calls the "
    'environment there, or let it run in a process of its own (name = "process")'
)


def unscored(reason: str | None) -> bool:
    """Whether an answer has no reward because the environment had nothing to say of it (None)."""
    return reason is not None and reason.startswith(UNSCORED)


def kind_of(reason: str) -> str:
    """What failures of one kind share: the reason's first line without the answer and without numbers."""
    line = reason.partition(ANSWER)[0].partition("\n")[0]
    return re.sub(r"\d+", "N", line)[:SHOWN_KIND]


def passes(error: BaseException) -> bool:
    """Whether another try of the call that raised `error` may succeed."""
    known = getattr(error, "passing", True)
    return bool(known) and not isinstance(error, NEVER_PASS) and not _does_not_fit(error) and not hint(error)


def _does_not_fit(error: BaseException) -> bool:
    """Whether a function can't be called with what it is given: nothing of its code has run."""
    if not isinstance(error, TypeError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).parent == Path(__file__).parent / "environments"


def hint(error: BaseException) -> str:
    """What to do about an exception that many people meet; empty if there is nothing to say."""
    text = str(error) if isinstance(error, ValueError | RuntimeError) else ""
    return MAIN_THREAD_HINT if any(known in text for known in ONLY_MAIN_THREAD) else ""


def place_of(error: BaseException) -> str:
    """Where an exception was raised, for telling reasons apart: file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
