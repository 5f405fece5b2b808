"""What `--colocate` means: trainer and server take turns on one GPU, or CPU, and divide its memory.

While the server is awake, the trainer keeps its weights and the optimiser's state there. While a step is
trained, its gradients and activations take the place of the server's weights and of its cache of keys and
values. So the size of that cache follows from all the rest. It is given to vLLM in bytes: what vLLM would
measure depends on what the trainer does meanwhile, and with it the longest answer that fits.
"""

from dataclasses import dataclass
from typing import Self

from cairn.config.inference import InferenceConfig
from cairn.config.rl import RLConfig
from cairn.launch.memory import CountedModels, Uncountable, count_models, serving_needs
from cairn.launch.needs import CONTEXT, GIB, Need, gib
from cairn.run.errors import UsageError
from cairn.run.machine import Machine

MIB = 1 << 20
ASLEEP = 2 * GIB
"""What a sleeping server still holds: CUDA's context, its kernels and its CUDA graphs."""
LEAST_CACHE = GIB // 2
"""Of keys and values; with less, a server answers few requests at a time, or none."""
FREE = 0.03
"""Share of the memory that stays free, for fragments and for what is counted too low."""


def taking_turns(config: RLConfig) -> RLConfig:
    """The settings with which trainer and server take turns.

    Raises:
        UsageError: a setting contradicts that.
    """
    orchestrator, trainer = config.orchestrator, config.trainer
    behind = orchestrator.max_off_policy_steps
    if behind and "max_off_policy_steps" in orchestrator.model_fields_set:
        raise UsageError(
            f"--orchestrator.max-off-policy-steps {behind}: with --colocate, trainer and server take turns, "
            "so no answer can come from an earlier policy; set it to 0, or give each a GPU of its own "
            "(--no-colocate, or a server elsewhere with --orchestrator.inference-url)"
        )
    if trainer.weight_transport != "files":
        raise UsageError(
            f"--trainer.weight-transport {trainer.weight_transport}: with --colocate, a policy must outlive "
            "its trainer, who may have to wait for a server that needs it; set it to files"
        )
    return config.model_copy(
        update={
            "orchestrator": orchestrator.model_copy(update={"max_off_policy_steps": 0, "colocated": True}),
            "trainer": trainer.model_copy(update={"colocated": True}),
            "inference": config.inference.model_copy(update={"colocated": True}),
        }
    )


@dataclass(frozen=True)
class SharedNeeds:
    """Bytes of a GPU that trainer and server need beside the cache of keys and values.

    kept: the trainer's between steps. gradients: what a step adds for certain. activations: what it adds by
    estimate. weights: the server's. work: by estimate, what an awake server needs more.
    """

    kept: int
    gradients: int
    activations: int
    weights: int
    work: int

    @classmethod
    def of(cls, rank: Need, server: Need) -> Self:
        """Of a rank and a server, each with a GPU of its own."""
        return cls(
            kept=rank.kept + CONTEXT,
            gradients=rank.counted - rank.kept,
            activations=rank.total - rank.counted - CONTEXT,
            weights=server.counted,
            work=server.total - server.counted,
        )


@dataclass(frozen=True)
class Shares:
    """What the server gets. cache: bytes for keys and values. warning: if a step may run out of memory."""

    cache: int
    utilization: float
    """The share of the GPU that must be free when vLLM starts, or it refuses to."""
    warning: str | None = None

    def given_to(self, config: InferenceConfig) -> InferenceConfig:
        """The server's settings with these limits, unless the user has set others."""
        arguments = ["--gpu-memory-utilization", f"{self.utilization:.2f}", *config.vllm_args]
        return config.model_copy(
            update={
                "kv_cache_memory": config.kv_cache_memory or f"{self.cache // MIB}M",
                "vllm_args": arguments,
            }
        )


def share_memory(
    config: RLConfig, folder: str, machine: Machine, counted: CountedModels | None = None
) -> tuple[RLConfig, Shares]:
    """The settings with the server's share of the GPU, and the shares.

    Args:
        config: settled.
        folder: Hugging Face directory of the model.
        machine: with that GPU alone.
        counted: the trainer's models, if they were counted.

    Raises:
        UsageError: trainer and server don't fit, even in turns.
    """
    try:
        trained = counted or count_models(folder, config.trainer, machine)
        rank = trained.needs(config.trainer, machine).rank
        server = serving_needs(folder, config.inference)
    except Uncountable as error:
        raise UsageError(
            f"--colocate: the GPU's memory can't be divided, since this model can't be counted ({error}); "
            "give each role a GPU (--trainer.gpus, --inference.gpus), or the address of a server elsewhere "
            "(--orchestrator.inference-url)"
        ) from None
    shares = divide(machine.gpus[0].memory, SharedNeeds.of(rank, server))
    return config.model_copy(update={"inference": shares.given_to(config.inference)}), shares


def divide(has: int, needs: SharedNeeds) -> Shares:
    """Divide the `has` bytes of a GPU.

    Raises:
        UsageError: trainer and server don't fit, even in turns.
    """
    free = int(FREE * has)
    by_turns = needs.kept + needs.gradients + ASLEEP + free
    if by_turns > has:
        raise _too_little(
            has,
            by_turns,
            f"while a step is trained, the trainer's weights and optimiser state {gib(needs.kept)}, its "
            f"gradients {gib(needs.gradients)}, the sleeping server {gib(ASLEEP)}, and {gib(free)} stay free",
        )
    awake = needs.kept + needs.weights + needs.work + free
    if awake + LEAST_CACHE > has:
        raise _too_little(
            has,
            awake + LEAST_CACHE,
            f"between two steps, the trainer's weights and optimiser state {gib(needs.kept)}, the server's "
            f"weights {gib(needs.weights)}, its graphs and activations {gib(needs.work)}, its cache of keys "
            f"and values {gib(LEAST_CACHE)} at least, and {gib(free)} stay free",
        )
    warning = None
    if (step := by_turns + needs.activations) > has:
        warning = (
            f"a training step needs about {gib(step)} of the GPU's {gib(has)} beside the sleeping server, of "
            f"which {gib(needs.activations)} are for activations, as estimated; what helps if it fails: "
            "--trainer.activation-checkpointing, a lower --trainer.micro-batch-size or --trainer.seq-len"
        )
    cache = (has - awake) // MIB * MIB
    return Shares(cache, max(0.01, (needs.weights + cache) / has - 0.01), warning)


def _too_little(has: int, total: int, parts: str) -> UsageError:
    return UsageError(
        f"--colocate: trainer and server need {gib(total)} of one GPU, which has {gib(has)}: {parts}. What "
        "helps: a smaller model, a larger GPU, a GPU for each (--trainer.gpus, --inference.gpus), or a "
        "server elsewhere (--orchestrator.inference-url)"
    )
