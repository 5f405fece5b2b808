"""Errors between a run and its servers.

Imports neither torch nor vllm, so that any process can use it.
"""

from typing import ClassVar

from cairn.run.errors import CairnError


class ServerUnavailable(CairnError):
    """The server does not answer, or failed to do what it was asked to."""


class ServerLacks(CairnError):
    """The server does not do what the run needs of it, as it was started."""


class ServerAsleep(ServerUnavailable):
    """The server sleeps: it is alive, has its weights, and generates again once it is woken."""


class ServerDisagrees(ServerUnavailable):
    """The server computes other logprobs than the trainer from the same weights."""


class WeightsAltered(ServerDisagrees):
    """The weights that the server received, or holds now, differ from those that the trainer published."""


class RequestRefused(CairnError, ValueError):
    """The server refused this request, as with a prompt that is too long; other requests it may well take."""


class WeightsRefused(CairnError):
    """The server refused the weights. It keeps serving the old ones, unless it is unfit for updates."""


class WeightsGone(CairnError):
    """The trainer no longer has the requested weights, only newer ones; the server keeps the old ones."""


class Unchanged(RuntimeError):
    """A process of a server has not loaded the weights, and still has the old ones; the message says why.

    The message begins with the `mark` of the class, because vLLM passes errors between processes as text.
    """

    mark: ClassVar[str]

    def __init__(self, reason: str):
        super().__init__(self.mark + reason)


class Unfit(RuntimeError):
    """The server can't load weights any more; its present ones may be partly new."""

    mark = "server unfit for updates: "

    def __init__(self, reason: str):
        super().__init__(self.mark + reason)


class NotHeld(RuntimeError):
    """The server's tensors differ from those that the trainer published; they may be partly old."""

    mark = "other weights than published: "

    def __init__(self, reason: str):
        super().__init__(self.mark + reason)


class Altered(Unchanged):
    """The received tensors differ from those that the trainer published."""

    mark = "weights altered on the way: "


class Gone(Unchanged):
    """The trainer already has a newer policy."""

    mark = "weights gone: "


class NotThere(Unchanged):
    """The trainer does not have that policy yet, or does not answer."""

    mark = "weights not there: "
