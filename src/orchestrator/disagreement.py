"""Explains from config.json why trainer and servers may compute different logprobs."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cairn.policy.errors import ServerDisagrees, WeightsAltered
from cairn.run.errors import UsageError
from cairn.run.files import read_json

SUSPECTS = (
    (("quantization_config",), "its weights are quantized", "start from a model that is not"),
    (
        ("attn_logit_softcapping", "final_logit_softcapping"),
        "it caps attention scores or logits (softcapping)",
        "vLLM's attention backend must implement that too (choose another with --inference.vllm-args)",
    ),
    (
        ("num_experts", "num_local_experts", "n_routed_experts"),
        "it is a mixture of experts",
        "rounding may route tokens to other experts: compute in float32 on both sides",
    ),
    (
        ("sliding_window", "layer_types"),
        "it mixes kinds of layers or has sliding-window attention",
        "see docs/models.md for what works",
    ),
    (
        ("rope_scaling", "rope_parameters"),
        "it has its own rotary parameters",
        "the server's vLLM and the trainer's transformers must interpret them alike",
    ),
)
"""Settings in config.json that trainer and servers may implement differently: keys, meaning, remedy."""


@contextlib.contextmanager
def explained(model: Path) -> Iterator[None]:
    """Turn a disagreement at the start of a run into a usage error that names suspicious model settings.

    Raises:
        UsageError: in place of ServerDisagrees.
        WeightsAltered: passed on unchanged, because damage on the way is not the model's fault.
    """
    try:
        yield
    except WeightsAltered:
        raise
    except ServerDisagrees as error:
        raise UsageError(
            f"the servers and the trainer do not compute the same model: {error}. {_blame(model)} "
            "--no-self-check skips this check, and the run would then learn from wrong logprobs"
        ) from error


def _blame(model: Path) -> str:
    config: dict[str, Any] = read_json(model / "config.json", dict[str, Any]) or {}
    settings = {**config, **(config.get("text_config") or {})}
    found = [
        f"{what} ({', '.join(name for name in names if settings.get(name))}): {remedy}."
        for names, what, remedy in SUSPECTS
        if any(settings.get(name) for name in names)
    ]
    found.append(
        "Trainer and server compute in their own data types: the difference is smallest with "
        "--trainer.precision.compute and --inference.dtype set alike."
    )
    return f"About {model} ({settings.get('model_type', 'unknown')}): " + " ".join(found)
