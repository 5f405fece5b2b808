"""What a place that keeps steps offers, wherever it is: the rules of retention work over any of them."""

from typing import Protocol

from cairn.checkpoint.manifest import Manifest


class Tier(Protocol):
    """A place that keeps steps, such as the local store (`checkpoint.store.CheckpointStore`)."""

    def steps(self) -> list[int]:
        """The steps that exist there, oldest first: those whose manifest is there."""
        ...

    def manifest(self, step: int) -> Manifest:
        """What a step says of itself.

        Raises:
            CheckpointError: the step does not exist, or its manifest is damaged.
        """
        ...

    def delete(self, step: int) -> None:
        """Delete a step, its manifest first.

        Raises:
            OSError: it can't be deleted.
        """
        ...
