"""How the trainer's ranks share what they compute, and what else can be set then."""

from collections.abc import Collection

from pydantic import Field

from cairn.config.model import LoraConfig
from cairn.config.settings import BaseConfig

WHOLE = frozenset({"muon", "adamw_8bit"})
"""Optimisers that need matrices, or blocks of their rows, whole."""


class ParallelConfig(BaseConfig):
    """How the ranks share what they compute, beside the samples of a batch, which are always divided."""

    context: int = Field(default=1, ge=1)
    """Neighbouring ranks that share the tokens of each row, for samples that are too long for one rank."""
    tensor: int = Field(default=1, ge=1)
    """Neighbouring ranks that share the matrices of each layer, for dense layers too large for one rank."""
    expert: int = Field(default=1, ge=1)
    """Neighbouring ranks that have the experts of each layer together; tokens travel to their experts."""

    pipeline: int = Field(default=1, ge=1)
    """Stages of consecutive layers, each on ranks of its own, through which micro-batches go one after the
    other; with backend = 'megatron'."""

    @property
    def is_used(self) -> bool:
        """Whether ranks share anything."""
        return max(self.model_dump().values()) > 1

    @property
    def neighbours(self) -> dict[str, int]:
        """By setting, how many neighbouring ranks exchange activations in every layer."""
        return {name: size for name, size in self.model_dump().items() if name != "pipeline"}

    def problem_of_ranks(self, ranks: int, replicas: int) -> str | None:
        """Why so many ranks can't be divided into replicas of the model, or share what they are to share."""
        if ranks % self.pipeline:
            return (
                f"parallel.pipeline = {self.pipeline} does not divide the ranks into equal parts: workers = "
                f"{ranks}"
            )
        staged = f", parallel.pipeline = {self.pipeline}" if self.pipeline > 1 else ""
        ranks, workers = ranks // self.pipeline, ranks
        sizes = {"replicas": replicas, "parallel.context": self.context, "parallel.tensor": self.tensor}
        for name, size in sizes.items():
            if ranks % size:
                return (
                    f"{name} = {size} does not divide the ranks into equal parts: workers = {workers}{staged}"
                )
        if ranks % (self.context * self.tensor):
            return (
                f"parallel.context = {self.context} and parallel.tensor = {self.tensor} share each row among "
                f"{self.context * self.tensor} ranks, which do not divide workers = {workers}{staged} into "
                "equal parts"
            )
        for name, size in {"parallel.tensor": self.tensor, "parallel.expert": self.expert}.items():
            if ranks // replicas % size:
                copies = f", replicas = {replicas}" if replicas > 1 else ""
                return (
                    f"{name} = {size} does not divide the ranks of each copy of the model into equal parts: "
                    f"workers = {workers}{copies}{staged}"
                )
        return None

    def problem_beside(
        self, lora: LoraConfig | None, optimizers: Collection[str], *, compiled: bool
    ) -> str | None:
        """Which of the trainer's other settings does not go with what ranks share, and why; None if all do.

        Args:
            optimizers: the types of all models' optimisers.
        """
        beside = {
            name: f"beside parallel.{name} = {size}"
            for name, size in (("context", self.context), ("tensor", self.tensor), ("expert", self.expert))
            if size > 1
        }
        if lora and lora.dropout and (shared := beside.get("context") or beside.get("tensor")):
            return (
                f"lora.dropout = {lora.dropout} {shared}: what is dropped of a token would depend on the "
                "rank that computes it"
            )
        if compiled and "context" in beside:
            return f"compile {beside['context']}: a compiled layer can't exchange tokens with other ranks"
        if compiled and "expert" in beside:
            known = "how many tokens travel to which experts is known to no compiled layer"
            return f"compile {beside['expert']}: {known}"
        if compiled and "tensor" in beside:
            return f"compile was not tried {beside['tensor']}"
        if "tensor" in beside and (whole := sorted(WHOLE.intersection(optimizers))):
            return (
                f"optimizer.type = {whole[0]!r}, which needs matrices or blocks whole, does not go "
                f"{beside['tensor']}"
            )
        return None
