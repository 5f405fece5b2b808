"""Why a server has not taken a policy, as its processes tell each other."""

from typing import ClassVar


class Unchanged(RuntimeError):
    """Why a process of a server has not loaded weights; those that it had are as they were.

    The message begins with the `mark` of its kind: vLLM hands errors from process to process as text.
    """

    mark: ClassVar[str]

    def __init__(self, reason: str):
        super().__init__(self.mark + reason)


class Unfit(RuntimeError):
    """The server can't be given other weights; it may have some of them now."""

    mark = "server unfit for updates: "

    def __init__(self, reason: str):
        super().__init__(self.mark + reason)


class NotHeld(RuntimeError):
    """The server's tensors are not those that the trainer published; it may have some of either now."""

    mark = "other weights than published: "

    def __init__(self, reason: str):
        super().__init__(self.mark + reason)


class Altered(Unchanged):
    """The tensors that came are not those that the trainer published."""

    mark = "weights altered on the way: "


class Gone(Unchanged):
    """The trainer has a newer policy by now."""

    mark = "weights gone: "


class NotThere(Unchanged):
    """The trainer does not have that policy yet, or does not answer."""

    mark = "weights not there: "
