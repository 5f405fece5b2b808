"""The keys under which FSDP2 programs store their state in a PyTorch distributed checkpoint (DCP)."""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from cairn.model.architectures import ARCHITECTURES, EXPERTS, ModelTensor, Names, Role

FILE_NAME = ".metadata"
"""The file in which torch lists what a checkpoint holds."""


@dataclass(frozen=True)
class Program:
    """The keys of one program.

    name: for messages. weights: what precedes a weight's name. state: what precedes `<weight>.exp_avg` and
    the like. groups: what precedes `<group>.lr` and the like. step, tokens, samples: progress. passed: what
    precedes keys that have no counterpart in Cairn, and what these are. titan: whether the weights have
    torchtitan's names.
    """

    name: str
    weights: str
    state: str
    groups: str
    step: str
    tokens: str = ""
    samples: str = ""
    passed: tuple[tuple[str, str], ...] = ()
    titan: bool = False

    def strange(self, keys: Collection[str]) -> list[str]:
        """The keys that are not of this program."""
        known = (self.state, self.groups, *(before for before, _ in self.passed))
        single = {self.step, self.tokens, self.samples}
        return sorted(
            key
            for key in keys
            if not self.is_weight(key)
            and key not in single
            and not key.startswith(known)
            and not self.is_expert_bias(key)
        )

    def has_weights(self, keys: Collection[str]) -> bool:
        """Whether some keys are weights of this program."""
        return any(self.is_weight(key) for key in keys)

    def is_weight(self, key: str) -> bool:
        return from_titan(key) is not None if self.titan else key.startswith(self.weights)

    def is_expert_bias(self, key: str) -> bool:
        """Whether a key is of a bias with which torchtitan balances experts, and which the hub has not."""
        return self.titan and EXPERT_BIAS.fullmatch(key) is not None

    def has_all_experts(self, name: str) -> bool:
        """Whether the weight that the program calls `name` is one tensor of all experts of a layer."""
        part = from_titan(name) if self.titan else None
        return part is not None and part.role in EXPERTS

    def named(self, name: str, expert: int | None = None) -> str:
        """The hub's name of a weight that the program calls `name`, or of one expert's part of it."""
        part = from_titan(name) if self.titan else None
        return (part and ARCHITECTURES["qwen3_moe"].name(replace(part, expert=expert))) or name


_SCHEDULE = "the state of the learning rate's schedule; set `[trainer.scheduler]`"
_DATA = "the position in the data; Cairn begins with its own data set"
_RANDOM = "the state of random generators; Cairn draws by seed and step"
_USUAL = (
    *(("scheduler.", _SCHEDULE), ("lr_scheduler.", _SCHEDULE), ("dataloader.", _DATA)),
    ("rng", _RANDOM),
)
PROGRAMS = (
    Program(
        "prime-rl",
        weights="app.model.",
        state="app.optimizers.state.",
        groups="app.optimizers.param_groups.",
        step="app.progress.step",
        tokens="app.progress.total_tokens",
        samples="app.progress.total_samples",
        passed=(("app.scheduler.", _SCHEDULE), ("app.progress.", "other progress")),
    ),
    Program(
        "torchtitan",
        weights="",
        state="optimizer.state.",
        groups="optimizer.param_groups.",
        step="train_state.step",
        tokens="train_state.ntokens_seen",
        passed=(("lr_scheduler.", _SCHEDULE), ("dataloader.", _DATA), ("train_state.", "other progress")),
        titan=True,
    ),
    Program(
        "NeMo-RL",
        weights="model.",
        state="optim.optim.state.",
        groups="optim.optim.param_groups.",
        step="",
        passed=(("optim.sched.", _SCHEDULE),),
    ),
    Program(
        "Telescope, or a program with the same keys",
        weights="model.",
        state="optimizer.state.",
        groups="optimizer.param_groups.",
        step="step",
        passed=_USUAL,
    ),
    Program(
        "a program of its own",
        weights="model.",
        state="optim.state.",
        groups="optim.param_groups.",
        step="step",
        passed=_USUAL,
    ),
)
"""In the order in which they are tried."""
TITAN_TYPES = ("llama", "qwen3", "qwen3_moe")
"""The model types whose names torchtitan and Cairn both know, by transformers' `model_type`."""
_LAYER = "layers.{layer}"
_EXPERTS = f"{_LAYER}.moe.routed_experts.inner_experts"
_TITAN: dict[Role, str] = {
    "embedding": "tok_embeddings",
    "attention_norm": f"{_LAYER}.attention_norm",
    "attention.query": f"{_LAYER}.attention.qkv_linear.wq",
    "attention.key": f"{_LAYER}.attention.qkv_linear.wk",
    "attention.value": f"{_LAYER}.attention.qkv_linear.wv",
    "attention.output": f"{_LAYER}.attention.wo",
    "attention.query_norm": f"{_LAYER}.attention.q_norm",
    "attention.key_norm": f"{_LAYER}.attention.k_norm",
    "mlp_norm": f"{_LAYER}.ffn_norm",
    "mlp.gate": f"{_LAYER}.feed_forward.w1",
    "mlp.up": f"{_LAYER}.feed_forward.w3",
    "mlp.down": f"{_LAYER}.feed_forward.w2",
    "router": f"{_LAYER}.moe.router.gate",
    "expert.gate": f"{_EXPERTS}.w1_EFD",
    "expert.up": f"{_EXPERTS}.w3_EFD",
    "expert.down": f"{_EXPERTS}.w2_EDF",
    "final_norm": "norm",
    "head": "lm_head",
}
TITAN = Names(_TITAN, bare=EXPERTS)
"""The names of torchtitan since 2026. A role of experts has one tensor for all of them, which are its first
dimension."""
EXPERT_BIAS = re.compile(r"layers\.(0|[1-9][0-9]{0,5})\.moe\.expert_bias_E")
"""What is added to a layer's scores of experts to choose some; transformers' Qwen3-MoE has no such bias."""
_OLDER = Names(
    {
        "attention.query": f"{_LAYER}.attention.wq",
        "attention.key": f"{_LAYER}.attention.wk",
        "attention.value": f"{_LAYER}.attention.wv",
        "head": "output",
    }
)
"""Those that older versions have instead."""


def from_titan(name: str) -> ModelTensor | None:
    """What the weight with a name of torchtitan's is; None if the tables lack it."""
    return TITAN.part(name) or _OLDER.part(name)


def expert_bias(layer: int) -> str:
    """The key of a layer's bias of experts."""
    return f"layers.{layer}.moe.expert_bias_E"
