"""What a pool of servers knows of each one, and the weights that it gives them."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from cairn.inference.client import Generation, InferenceClient
from cairn.run.directory import WEIGHT_SOURCE
from cairn.run.files import read_json


@dataclass(frozen=True, eq=False)
class Weights:
    """A policy version that servers are given: its folder, name, and size of its tensor files in bytes."""

    folder: str
    version: str
    size: int


class Member:
    """One server of the pool, and what is known of it."""

    def __init__(self, url: str, client: InferenceClient):
        self.url = url
        self.client = client
        self.ready = False
        self.problem = f"{url}: not asked yet"
        self.refusal: Exception | None = None
        """Why it does not take the current weights, if pushing them again would not help; one of REFUSALS."""
        self.version: str | None = None
        """The version that it last confirmed."""
        self.weights: Weights | None = None
        """What this pool gave it last, in its present life; None: something else, or nobody knows."""
        self.pushes = 0
        self.epoch: str | None = None
        self.capacity = 1
        self.max_model_len: int | None = None
        self.sequences = 0
        self.requests: set[asyncio.Task[list[Generation]]] = set()
        self.silent_since: float | None = None
        self.delay = 0.0
        self.pushing = asyncio.Lock()
        self.wake = asyncio.Event()
        self.keeper: asyncio.Task[None] | None = None

    @property
    def load(self) -> float:
        """Sequences in flight, as a share of those that it runs at once; above 1 they queue."""
        return self.sequences / self.capacity


def tensor_bytes(folder: Path) -> int:
    """Bytes of the tensors that a directory holds or tells of; 0 if only the servers can see it."""
    if source := read_json(folder / WEIGHT_SOURCE):
        return source["bytes"]
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
