"""The keys under which FSDP2 programs store their state in a PyTorch distributed checkpoint (DCP)."""

from collections.abc import Collection
from dataclasses import dataclass

from cairn.checkpoint.formats.architectures import ARCHITECTURES, Names, Role

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
            if not self._is_weight(key) and key not in single and not key.startswith(known)
        )

    def has_weights(self, keys: Collection[str]) -> bool:
        """Whether some keys are weights of this program."""
        return any(self._is_weight(key) for key in keys)

    def weight(self, key: str) -> str | None:
        """The name of the weight with a key, as the hub and transformers have it; None for other keys."""
        if not self._is_weight(key):
            return None
        return self.named(key.removeprefix(self.weights))

    def named(self, name: str) -> str:
        """The hub's name of a weight that the program calls `name`."""
        return from_titan(name) or name if self.titan else name

    def _is_weight(self, key: str) -> bool:
        return from_titan(key) is not None if self.titan else key.startswith(self.weights)


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
TITAN_TYPES = ("llama", "qwen3")
"""The model types whose names torchtitan and Cairn both know, by transformers' `model_type`."""
_LAYER = "layers.{layer}"
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
    "final_norm": "norm",
    "head": "lm_head",
}
TITAN = Names(_TITAN)
"""The names of torchtitan since 2026."""
_OLDER = Names(
    {
        "attention.query": f"{_LAYER}.attention.wq",
        "attention.key": f"{_LAYER}.attention.wk",
        "attention.value": f"{_LAYER}.attention.wv",
        "head": "output",
    }
)
"""Those that older versions have instead."""


def from_titan(name: str) -> str | None:
    """The hub's name of a weight of torchtitan's; None if the tables lack it."""
    part = TITAN.part(name) or _OLDER.part(name)
    return part and ARCHITECTURES["qwen3"].name(part)
