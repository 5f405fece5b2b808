"""Whose a prefix is: which run, and which attempt of it may write.

`run.json` says so. Where it is missing, since it was lost or the prefix was copied without it, the newest
step whose manifest can be read says which run. `attempts/N.json` is put once and never replaced, so each
attempt has a number of its own, whichever machines start at the same moment.
"""

import abc
import contextlib
import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from cairn.checkpoint.manifest import CheckpointError, Manifest
from cairn.remote.client.objects import Objects
from cairn.run.errors import UsageError
from cairn.run.object_store import Exists, RemoteError

CLAIM = "run.json"
ATTEMPTS = "attempts"
NOBODY = "ckpt copy"
"""The owner of a prefix to which no attempt has uploaded."""


class Taken(UsageError):
    """A prefix belongs to another run, or another attempt of this run has taken it over."""


class Claims(abc.ABC):
    """Whose the prefix of `objects` is.

    Every method raises RemoteError if the object store refuses or fails, or if nobody can say whose the
    prefix is.
    """

    objects: Objects

    @abc.abstractmethod
    def steps(self) -> Sequence[int]:
        """The steps that exist, oldest first."""

    @abc.abstractmethod
    def manifest(self, step: int) -> Manifest:
        """The manifest of a step."""

    def owner(self) -> str | None:
        """The id of the run that the prefix belongs to; None if it belongs to none."""
        found = self._claim() or self._of_steps()
        return None if found is None else str(found.get("run_id"))

    def newest_attempt(self) -> Mapping[str, Any]:
        """What is known of the newest attempt; of one that is known by its steps, number and branch alone."""
        noted = (self._claim() or {}).get("attempt")
        if not isinstance(noted, dict):
            noted = (self._of_steps() or {}).get("attempt")
        return cast("Mapping[str, Any]", noted) if isinstance(noted, dict) else {}

    def reserve(self, run_id: str, token: str, least: int) -> int:
        """A number for a new attempt that no other attempt has, or will have, here.

        Args:
            token: tells the attempt from all others.
            least: the number if as many attempts, or fewer, are known here.

        Raises:
            Taken: the prefix belongs to another run.
        """
        self._refuse_others(run_id)
        names = (Path(name).stem for name, _ in self.objects.list(ATTEMPTS))
        known = [int(name) for name in names if name.isdecimal()]
        number = max([least, *(n + 1 for n in (*known, _number(self.newest_attempt())))])
        text = json.dumps({"run_id": run_id, "token": token, "since": _now()}, indent=1).encode()
        while True:
            try:
                self.objects.put_new(f"{ATTEMPTS}/{number}.json", text)
                return number
            except Exists:  # another machine came first by a moment
                number += 1

    def claim(self, run_id: str, owner: str, attempt: Mapping[str, Any] | None = None) -> None:
        """Take the prefix for an attempt of a run; an older attempt of the same run loses it.

        Args:
            owner: identifies the attempt, wherever it runs.
            attempt: what a machine with an empty disk needs to know of the attempt; if None, what was noted
                of the one before stays.

        Raises:
            Taken: it belongs to another run, or to an attempt with a higher number.
        """
        self._refuse_others(run_id)
        found = self._claim() or {}
        newest = _number(found.get("attempt"))
        if attempt is not None and found.get("owner") != owner and newest > _number(attempt):
            raise Taken(
                f"ckpt.remote {self.objects.url}: attempt {newest} of this run has begun elsewhere meanwhile "
                f"({found.get('since')}); see whether it is at work before you start the run again"
            )
        noted = attempt if attempt is not None else found.get("attempt")
        content = {"run_id": run_id, "owner": owner, "since": _now(), "attempt": noted}
        text = json.dumps(content, indent=1).encode()
        if found:
            self.objects.put(CLAIM, text)
            return
        try:
            self.objects.put_new(CLAIM, text)
        except Exists:  # another run, or a process of this one, came first by a moment
            self.claim(run_id, owner, attempt)

    def claim_for_run(self, run_id: str) -> None:
        """See to it that the prefix belongs to a run; an attempt that has claimed it keeps it.

        Raises:
            Taken: it belongs to another run.
        """
        self._refuse_others(run_id)
        if self._claim() is None:
            content = {"run_id": run_id, "owner": NOBODY, "since": _now(), "attempt": None}
            with contextlib.suppress(Exists):
                self.objects.put_new(CLAIM, json.dumps(content, indent=1).encode())
            self._refuse_others(run_id)

    def check_owner(self, owner: str) -> None:
        """Check that no other attempt has claimed the prefix since.

        Raises:
            Taken: one has, or the claim is gone.
        """
        found = self._claim()
        if found is None:
            raise Taken(f"{self.objects.url}/{CLAIM} was deleted; start the run again to go on uploading")
        if found.get("owner") != owner:
            raise Taken(
                f"ckpt.remote {self.objects.url}: another attempt has taken it over ({found.get('since')})"
            )

    def _refuse_others(self, run_id: str) -> None:
        owner = self.owner()
        if owner not in (None, run_id):
            raise Taken(
                f"ckpt.remote {self.objects.url} belongs to run {owner}, and this is run {run_id}; "
                "give another prefix"
            )

    def _of_steps(self) -> dict[str, Any] | None:
        """What the newest step that can be read says; None if there is no step."""
        steps = self.steps()
        for step in reversed(steps):
            with contextlib.suppress(CheckpointError):
                found = self.manifest(step)
                about = {"number": found.attempt, "branch": found.branch}
                return {"run_id": found.run_id, "attempt": about}
        if steps:
            raise RemoteError(
                f"{self.objects.url}: has steps, but no {CLAIM}, and no manifest that can be read, so it is "
                "unknown which run they are of; give another prefix"
            )
        return None

    def _claim(self) -> dict[str, Any] | None:
        text = self.objects.get(CLAIM)
        if text is None:
            return None
        try:
            content = json.loads(text)
        except ValueError:
            content = None
        if not isinstance(content, dict) or "run_id" not in content:
            raise RemoteError(
                f"{self.objects.url}/{CLAIM}: is damaged; if the prefix is this run's, delete the object: "
                "the steps there say which run they are of"
            )
        return cast("dict[str, Any]", content)


def _number(attempt: object) -> int:
    """The number of an attempt by what is noted of it; 0 if that says none."""
    number = cast("Mapping[str, Any]", attempt).get("number") if isinstance(attempt, Mapping) else None
    return number if isinstance(number, int) else 0


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
