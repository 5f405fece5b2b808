"""What goes wrong between a run and its servers.

Imports neither torch nor vllm, so that any process can use it.
"""

from cairn.run.errors import CairnError


class ServerUnavailable(CairnError):
    """The server does not answer, or failed to do what it was asked for."""


class ServerDisagrees(ServerUnavailable):
    """The server does not compute what the trainer does, whose weights it was given."""


class WeightsAltered(ServerDisagrees):
    """The weights that came to the server, or that it holds now, are not those that the trainer published."""


class WeightsRefused(CairnError):
    """The server does not take the weights; unless it is unfit for updates it goes on with what it had."""


class WeightsGone(CairnError):
    """The trainer that was to send the weights has newer ones; the server goes on with those that it had."""
