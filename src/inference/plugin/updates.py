"""vLLM plugin: what a run asks for when it gives the server a policy, and what each way of taking one is.

Runs inside vLLM's API process only.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field

from pydantic import BaseModel, Field

from cairn.inference.plugin.weight_files import UnusableWeights
from cairn.policy.errors import Altered, Gone, NotThere, Unchanged

CODES = {UnusableWeights.mark: 422, Altered.mark: 412, Gone.mark: 410, NotThere.mark: 503}
"""Status codes for weights that were not loaded, by the mark of the reason."""


class WeightUpdate(BaseModel):
    """Body of `POST /cairn/update_weights`."""

    # A directory, as this machine sees it.
    path: str = Field(min_length=1)
    version: str = Field(min_length=1, max_length=256, pattern=r"^[!-~]+$")
    # Whether requests in flight keep the keys and values that the old weights made of their tokens.
    keep_cache: bool = False


@dataclass
class PolicyUpdate:
    """An update that is under way. before: the version that is served until it is done."""

    version: str
    before: str
    since: float = field(default_factory=time.monotonic)
    pauses: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when generation is about to be paused; from then on the engine answers no questions."""


class NotTaken(Exception):
    """The server has not taken a policy; `code` is the status code of the answer that says so."""

    def __init__(self, code: int, reason: str):
        super().__init__(reason)
        self.code = code

    @classmethod
    def because(cls, error: Unchanged) -> "NotTaken":
        """For a reason that left everything as it was."""
        return cls(CODES[error.mark], str(error).removeprefix(error.mark))


class Updates(ABC):
    """How a server takes the policies that it is given, one after the other."""

    @abstractmethod
    async def version(self) -> str:
        """The policy that it has; `"default"` before there was one. Asks the engine."""

    @property
    @abstractmethod
    def adapter(self) -> str | None:
        """What requests have to give as their `model` to be answered from `version`; None: nothing."""

    @property
    @abstractmethod
    def must_name(self) -> Collection[str] | None:
        """Of which every request has to give one as its `model`; None: of none."""

    @abstractmethod
    async def take(self, update: WeightUpdate, noted: PolicyUpdate) -> str:
        """Take a policy; returns what `version` is from then on: that of the update.

        Args:
            noted: told when generation is about to be paused.

        Raises:
            NotTaken: it can't; the code says in which state the server is left.
        """
