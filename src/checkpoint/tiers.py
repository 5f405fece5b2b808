"""The interface to a place that keeps steps; the rules of retention work with any of them."""

from typing import Protocol

from cairn.checkpoint.manifest import Manifest


class Tier(Protocol):
    """A place that keeps steps, such as the local store (`checkpoint.store.CheckpointStore`)."""

    def steps(self) -> list[int]:
        """The steps that exist there, oldest first: those that have a manifest."""
        ...

    def manifest(self, step: int) -> Manifest:
        """The manifest of a step.

        Raises:
            CheckpointError: the step does not exist, or its manifest is damaged.
        """
        ...

    def delete(self, step: int) -> None:
        """Delete a step, its manifest first.

        Raises:
            OSError: it can't be deleted.
            RemoteError: likewise, in an object store.
        """
        ...
