"""A look at an object store before a run relies on it."""

import datetime
import os

from cairn.remote.client.objects import Objects
from cairn.run.object_store import Exists, RemoteError

MOST_SKEW = 300
"""Seconds by which the clocks may differ; S3 refuses requests from 15 minutes on."""


def probe(objects: Objects, owner: str) -> None:
    """Check that objects can be written, read, listed and deleted, only if they are new, and the clock.

    Raises:
        RemoteError: something fails; the message says what it is needed for.
    """
    name, content = f"probe/{owner}", os.urandom(16)
    objects.delete([name])
    objects.put_new(name, content)
    if objects.get(name) != content:
        raise RemoteError(f"{objects.url}/{name}: reads differently from what was written")
    try:
        objects.put_new(name, b"another content")
    except Exists:
        pass
    else:
        raise RemoteError(
            f"{objects.url}: ignores the condition If-None-Match, so two runs could commit the same step; "
            "use a store that knows it"
        )
    if name not in [found for found, _ in objects.list("probe")]:
        raise RemoteError(f"{objects.url}/{name}: was written, but is not listed")
    skew = (objects.modified(name) - datetime.datetime.now(datetime.UTC)).total_seconds()
    if abs(skew) > MOST_SKEW:
        raise RemoteError(
            f"{objects.url}: its clock and this machine's differ by {abs(skew):.0f} s; set the clock"
        )
    objects.delete([name])
    if objects.get(name) is not None:
        raise RemoteError(
            f"{objects.url}/{name}: was deleted, but is still there; old steps could not be removed"
        )
