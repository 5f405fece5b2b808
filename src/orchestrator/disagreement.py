"""Why a model's logprobs may differ between trainer and servers, from its config.json."""

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
        "it caps attention scores or logits",
        "vLLM's attention kernels have to do so too (another one: --inference.vllm-args)",
    ),
    (
        ("num_experts", "num_local_experts", "n_routed_experts"),
        "it is a mixture of experts",
        "rounding may choose other experts: compute in float32 on both sides",
    ),
    (
        ("sliding_window", "layer_types"),
        "its layers are of several kinds, or see a window only",
        "see docs/models.md for what works",
    ),
    (
        ("rope_scaling", "rope_parameters"),
        "it has rotary parameters of its own",
        "the server's and transformers' versions have to read them alike",
    ),
)
"""Settings in config.json that trainer and server may implement differently, and what to do about each."""


@contextlib.contextmanager
def explained(model: Path) -> Iterator[None]:
    """Turn a disagreement about the first policies of a run into a usage error: it is about the model itself.

    Raises:
        UsageError: instead of ServerDisagrees.
        WeightsAltered: as it is: what went wrong on the way is not the model's fault.
    """
    try:
        yield
    except WeightsAltered:
        raise
    except ServerDisagrees as error:
        raise UsageError(
            f"the servers and the trainer do not compute the same model: {error}. {_blame(model)} "
            "--no-self-check goes on all the same, and would learn from logprobs that are wrong"
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
        "Trainer and server compute in their own data types: with --trainer.precision.compute and "
        "--inference.dtype set alike the difference is smallest."
    )
    return f"About {model} ({settings.get('model_type', 'unknown')}): " + " ".join(found)
