"""Whether a run that must end soon still saves its newest step, and what becomes of its uploads.

A save that does not end in time is worth nothing, and takes the disk and the network from an upload that
would have ended. So both are compared with how long the newest ones took.
"""

from dataclasses import dataclass

from cairn.run.waiting import Span


@dataclass(frozen=True)
class Newest:
    """The newest step that is saved.

    waits: whether it still has to be uploaded. upload: how long that takes, if it was ever measured.
    """

    step: int
    waits: bool = False
    upload: Span | None = None


@dataclass(frozen=True)
class LastSave:
    """Whether the step is saved, and why, in words with the times that decided."""

    saves: bool
    reason: str


def decide(
    step: int, left: float, save: Span | None, upload: Span | None, newest: Newest | None, *, remote: bool
) -> LastSave:
    """Decide on the save of `step` for a run that must end in `left` seconds.

    - A save that the quickest of the newest ones would not end is not begun.
    - One that ends only if it is quicker than the slowest is begun if no upload needs the time.
    - Without a measurement it is begun.

    Args:
        save: how long a save takes, a save in progress included; None: it was never measured.
        upload: the same of the step's upload, the uploads before it included.
        newest: the newest step that is saved; None if there is none.
        remote: whether steps are uploaded.
    """
    time = f"{max(left, 0):.0f} s are left"
    if save is None:
        return LastSave(True, f"{time}; no save was measured yet: step {step} is saved all the same")
    waits = newest is not None and newest.waits
    if left < save.least or (left < save.most and waits):
        return LastSave(False, f"{time}, and a save takes {save}{_what_is_left(newest, left, remote)}")
    risky = "" if left >= save.most else ", so it may not end"
    start = f"{time}, and a save takes {save}{risky}: step {step} is saved"
    if not remote:
        return LastSave(True, start)
    if upload is None:
        return LastSave(True, f"{start}; no upload was measured yet: it is uploaded as far as time allows")
    if save.most + upload.most <= left:
        return LastSave(True, f"{start} and uploaded, which takes {upload}")
    first = ""
    if newest is not None and newest.waits and newest.upload is not None and newest.upload.most <= left:
        first = f", so step {newest.step} is uploaded first, which takes {newest.upload}"
    return LastSave(True, f"{start} on this disk; its upload, which takes {upload}, may not end{first}")


def _what_is_left(newest: Newest | None, left: float, remote: bool) -> str:
    """What a run keeps that does not save its newest step."""
    if newest is None:
        return "; no earlier step is saved"
    if not remote:
        return f"; step {newest.step} is saved"
    if not newest.waits:
        return f"; step {newest.step} is saved and uploaded"
    takes = f", which takes {newest.upload}" if newest.upload else ""
    ends = "" if newest.upload is None or newest.upload.most <= left else " and may not end"
    return f"; step {newest.step} is saved, and the time goes to its upload{takes}{ends}"
