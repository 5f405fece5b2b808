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
    """Neighbouring ranks that share the matrices of each layer, for layers too large for one rank."""
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
        for name, size in {"replicas": replicas, "parallel.context": self.context}.items():
            if ranks % size:
                return (
                    f"{name} = {size} does not divide the ranks into equal parts: workers = {workers}{staged}"
                )
        for name, size in {"parallel.tensor": self.tensor, "parallel.expert": self.expert}.items():
            if ranks // replicas % size:
                copies = f", replicas = {replicas}" if replicas > 1 else ""
                return (
                    f"{name} = {size} does not divide the ranks of each copy of the model into equal parts: "
                    f"workers = {workers}{copies}{staged}"
                )
        if ranks % (self.context * self.tensor):
            return (
                f"parallel.context = {self.context} and parallel.tensor = {self.tensor} share each row among "
                f"{self.context * self.tensor} ranks, which do not divide workers = {workers}{staged} into "
                "equal parts"
            )
        return None

    def problem_beside(
        self, lora: LoraConfig | None, optimizers: Collection[str], *, compiled: bool
    ) -> str | None:
        """Which of the trainer's other settings does not go with what ranks share, and why; None if all do.

        Args:
            optimizers: the types of all models' optimisers.
        """
        if problem := self._problem_beside_lora(lora):
            return problem
        if compiled and (problem := self._problem_beside_compile()):
            return problem
        if self.tensor > 1 and (whole := sorted(WHOLE.intersection(optimizers))):
            needs = f"optimizer.type = {whole[0]!r}, which needs matrices or blocks whole, does not go"
            return f"{needs} beside parallel.tensor = {self.tensor}"
        return None

    def _problem_beside_lora(self, lora: LoraConfig | None) -> str | None:
        shared = {"context": self.context, "tensor": self.tensor}
        for name, size in shared.items():
            if lora and lora.dropout and size > 1:
                return (
                    f"lora.dropout = {lora.dropout} beside parallel.{name} = {size}: what is dropped of a "
                    "token would depend on the rank that computes it"
                )
        return None

    def _problem_beside_compile(self) -> str | None:
        reasons = {
            "context": (self.context, "a compiled layer can't exchange tokens with other ranks"),
            "expert": (self.expert, "how many tokens travel to which experts is known to no compiled layer"),
            "tensor": (self.tensor, "it was not tried"),
        }
        for name, (size, reason) in reasons.items():
            if size > 1:
                return f"compile beside parallel.{name} = {size}: {reason}"
        return None
