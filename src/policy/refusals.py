"""The reasons for which a server has not loaded a policy, as its processes report them to each other."""

from typing import ClassVar


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
