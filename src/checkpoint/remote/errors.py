"""Errors of object stores."""

from cairn.run.errors import CairnError


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
