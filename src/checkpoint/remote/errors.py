"""Errors of object stores."""

from cairn.run.errors import CairnError

OF_WRONG_CLOCKS = (
    "RequestTimeTooSkewed",
    "Request date header too old",
    "Token must be a short-lived token (60 minutes) and in a reasonable timeframe",
)
"""What S3, Azure and Google say if the time in a request is not theirs."""


class RemoteError(CairnError):
    """An object store refused or failed; the message names the object and what to do."""


class Unsure(RemoteError):
    """A request failed in a way that may pass."""


class NoCredentials(Unsure):
    """The environment has no credentials, and no service of the machine's gave any."""


class Exists(RemoteError):
    """An object that should be new exists already."""


class Refused(RemoteError):
    """S3 refused a request for a reason that has a name.

    Attributes:
        code: S3's name for it, such as NoSuchUpload.
    """

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


def denial(text: str) -> str:
    """What to do about a request that was denied with this text: stores deny those of a wrong clock, too."""
    if any(words in text for words in OF_WRONG_CLOCKS):
        return f"this machine's clock is wrong, so requests are denied; set the clock ({text})"
    return f"access was denied; check the credentials ({text})"


def said(error: Exception) -> str:
    """The beginning of an error of obstore, which goes on with a debugging form of the same."""
    return str(error).split("\n\nDebug source:")[0].strip()[:600]
