"""Errors between a run and its servers.

Imports neither torch nor vllm, so that any process can use it.
"""

from cairn.run.errors import CairnError


class ServerUnavailable(CairnError):
    """The server does not answer, or failed to do what it was asked to."""


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
