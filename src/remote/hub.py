"""The Hugging Face hub, or a server that speaks as it does, as a place for models.

`huggingface_hub` does the uploading. What a repository shows changes with the commit alone, which comes last,
so a push that was killed has changed nothing; files that it has uploaded are found there, and not uploaded
again.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cairn.run.errors import CairnError, UsageError

T = TypeVar("T")

REPOSITORY = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*")
TOKEN = re.compile(r"hf_\w+|Bearer [\w.~+/=-]+")
"""What looks like a secret in an error's text."""
TRIES = 5
WAIT = 1.0
"""Seconds before the second try; each later one waits twice as long as the one before."""


class HubError(CairnError):
    """The hub refuses, or can't be reached; the repository shows what it did before."""


@dataclass(frozen=True)
class Pushed:
    """A commit. url: of the repository at that commit. new: whether it has changed anything."""

    url: str
    commit: str
    new: bool


def push(
    repository: str,
    files: Mapping[str, Path | bytes],
    *,
    message: str,
    branch: str = "main",
    private: bool | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Pushed:
    """Upload files into a model repository, which is made if there is none, as one commit.

    Files with the content that they have there already are left out; other files of the repository stay.
    Where the hub is (HF_ENDPOINT) and who pushes (HF_TOKEN, or what `hf auth login` has stored) is said as to
    any program that uses the hub.

    Args:
        repository: such as `name/model`.
        files: by name in the repository: a local file, or content.
        private: whether a repository that is made is private; None: as its owner has it by default.
        say: is told of a try that failed.

    Raises:
        UsageError: the name can't be one of a repository, or there is no token.
        HubError: it was refused, or failed too often.
    """
    if not REPOSITORY.fullmatch(repository):
        raise UsageError(f"{repository}: is no name of a repository; give one such as my-name/my-model")
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    where = f"{api.endpoint}/{repository}"
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        raise UsageError("HF_HUB_OFFLINE is set, which forbids to reach the hub: unset it to push")
    if get_token() is None:
        raise UsageError(f"{where}: there is no token to push with; set HF_TOKEN, or run `hf auth login`")

    def create() -> Any:
        return api.create_repo(repository, private=private, exist_ok=True)

    def commit() -> Any:
        operations = [
            CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
            for name, content in sorted(files.items())
        ]
        return api.create_commit(repository, operations, commit_message=message, revision=branch)

    def before() -> str:
        return str(api.repo_info(repository, revision=branch).sha)

    _trying(create, where, say)
    if branch != "main":
        _trying(lambda: api.create_branch(repository, branch=branch, exist_ok=True), where, say)
    earlier = _trying(before, where, say)
    made = _trying(commit, where, say)
    return Pushed(f"{where}/tree/{made.oid}", str(made.oid), new=made.oid != earlier)


def _trying(work: Callable[[], T], where: str, say: Callable[[str], None]) -> T:
    """Do it, several times if the network or the hub fails; what is refused is not tried again.

    Raises:
        HubError: see `push`.
    """
    for number in range(1, TRIES + 1):
        try:
            with _explained(where):
                return work()
        except _Passing as error:
            if number == TRIES:
                raise HubError(f"{error}, {TRIES} times; the same command goes on with the rest") from None
            seconds = WAIT * 2 ** (number - 1)
            say(f"{error}; trying again in {seconds:g} s")
            time.sleep(seconds)
    raise AssertionError("a try returns or raises")


class _Passing(Exception):
    """What may be over in a moment."""


@contextlib.contextmanager
def _explained(where: str) -> Generator[None]:
    """Errors of `huggingface_hub` as ours, without what must not be printed.

    Raises:
        HubError: the hub says no. _Passing: the network, or the hub, fails.
    """
    from huggingface_hub.errors import HfHubHTTPError

    passing = network_errors()
    try:
        yield
    except HfHubHTTPError as error:
        code = error.response.status_code
        if code >= 500 or code in (408, 409, 412, 429):  # 409, 412: somebody else's commit came between
            raise _Passing(f"{where}: {_short(error)}") from None
        hint = {401: "the token is not accepted", 403: "the token may not write there"}.get(code, "")
        raise HubError(f"{where}: {_short(error)}{hint and f' ({hint})'}") from None
    except passing as error:
        raise _Passing(f"{where}: {_short(error)}") from None
    except ValueError as error:  # such as a header of the model card that the hub does not take
        raise HubError(f"{where}: {_short(error)}") from None
    except RuntimeError as error:  # of an upload; its cause says what it was
        cause = error.__cause__
        if isinstance(cause, passing):
            raise _Passing(f"{where}: {_short(error)} {_short(cause)}") from None
        raise


def network_errors() -> tuple[type[Exception], ...]:
    """What `huggingface_hub` raises if the network fails: errors of the HTTP client that its version uses."""
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage] # which client's it is

    return HTTPError, ConnectionError, TimeoutError


def _short(error: BaseException) -> str:
    """The first line of an error's text, without secrets."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return TOKEN.sub("***", lines[0].strip())
