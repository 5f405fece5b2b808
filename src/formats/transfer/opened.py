"""Opens an export with the program that it is made for, and compares the logits with those of the step.

Reading back compares values by Cairn's own reader, which shares its errors with the writer. transformers and
PEFT are other readers: what they make of names, config.json and scaling is seen in logits alone.
"""

# torch, transformers and PEFT are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import contextlib
import gc
import importlib.metadata
import importlib.util
import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.step_folder import MODEL
from cairn.formats.base import Content, Stage, WriteOptions
from cairn.formats.common.match_layout import outgoing_weights
from cairn.formats.common.verified_reads import KeptValues
from cairn.model.adapters import base_folder
from cairn.model.described import about_model

MOST_BYTES = 2 << 30
"""The largest model, in float32, whose logits are compared unless that is asked for."""
TOKENS = 12
TOLERANCE = 1e-3
"""Of the largest logit; the order in which values are added may differ."""
HOW: Mapping[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
AUTO, ALWAYS, NEVER = "auto", "always", "never"
"""When logits are compared: of models of up to MOST_BYTES, of any, of none."""


@dataclass(frozen=True)
class Opener:
    """Opens an export in a program. package: what has to be installed. open: gets the export and the step's
    folder of the model, and returns the model in float32."""

    package: str
    open: Callable[[Path, Path], Any]


def _transformers(export: Path, model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(export, **HOW)


def _state_dict(export: Path, model: Path) -> Any:
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(export), **HOW)
    made.load_state_dict(torch.load(export / "model.pt", weights_only=True))
    return made


def _peft(export: Path, model: Path) -> Any:
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(base_folder(model), **HOW)
    return PeftModel.from_pretrained(base, export)


def _gguf(export: Path, model: Path) -> Any:
    config = AutoConfig.from_pretrained(model)
    return AutoModelForCausalLM.from_pretrained(export, gguf_file="model.gguf", config=config, **HOW)


OPENERS: Mapping[str, Opener] = {
    "hf": Opener("transformers", _transformers),
    "hf-trainer": Opener("transformers", _transformers),
    "pt": Opener("transformers", _state_dict),
    "peft": Opener("peft", _peft),
    "gguf": Opener("gguf", _gguf),
}
"""By format. ONNX files are run in onnxruntime when they are read back."""
UNKNOWN_TO_GGUF = frozenset({"gemma"})
"""Values of `model_type` that transformers does not read from GGUF files."""


def compare_logits(
    name: str, export: Path, content: Content, options: WriteOptions, stage: Stage, when: str = AUTO
) -> str:
    """What came of opening the export in the folder `export`, in the format `name`, for the command to print.

    It takes twice the memory of the model in float32, for a moment each, and a forward pass of a few tokens.

    Args:
        content: that of the step which was exported.
        when: AUTO, ALWAYS or NEVER.

    Returns:
        An empty string if the format has no such program, or nothing was asked for.

    Raises:
        Damaged: it can't be opened, or computes other logits.
    """
    opener = OPENERS.get(name)
    if when == NEVER or opener is None or content.model is None:
        return ""
    about = about_model(content.model)
    kinds = " ".join(map(str, about.get("architectures") or []))
    if "Classification" in kinds:
        return ""
    if name == "gguf" and (about.get("model_type") in UNKNOWN_TO_GGUF or options.dtype or options.quantize):
        return ""  # rounded logits tell little, and every weight was compared
    if importlib.util.find_spec(opener.package) is None:
        return f"not opened: {opener.package} is not installed"
    nbytes = 4 * sum(math.prod(source.spec.shape) for source in content.tensors[MODEL].values())
    if when == AUTO and nbytes > MOST_BYTES:
        return f"logits not compared: {nbytes / 2**30:.1f} GiB in float32 (--logits always)"
    progress = stage(f"opening in {opener.package}", 2 * nbytes)
    expected = _logits(_of_step(content, content.model, options))
    progress(nbytes)
    try:
        with _without_bars():
            found = _logits(opener.open(export, content.model))
    except (OSError, MemoryError):
        raise
    except Exception as error:  # whatever transformers runs into
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Damaged(f"{export}: {opener.package} can't open it: {reason}") from None
    progress(nbytes)
    apart = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    if not apart <= TOLERANCE:
        raise Damaged(
            f"{export}: {opener.package} computes other logits of it: they differ by {apart:.1e} of the "
            "largest. --logits never exports without this check; please report it"
        )
    return f"logits in {opener.package} {importlib.metadata.version(opener.package)} equal within {apart:.0e}"


@contextlib.contextmanager
def _without_bars() -> Generator[None]:
    """A context in which transformers shows no bars of its own: the command's are enough."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _of_step(content: Content, folder: Path, options: WriteOptions) -> Any:
    """The step's model in float32, its weights rounded as they are exported.

    Raises:
        CheckpointError: the weights do not fit config.json.
    """
    weights, _ = outgoing_weights(KeptValues(content, options.dtype).content)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), **HOW)
    state = model.state_dict()
    with torch.no_grad():
        for key, weight in weights.items():
            state[key].copy_(weight.read())
    return model


def _logits(model: Any) -> torch.Tensor:
    """Those of a few tokens, spread over the vocabulary, float32 [tokens, vocabulary]."""
    rows = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(TOKENS) * 7919 + 11) % rows
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=ids[None], use_cache=False).logits[0].float()
    del model
    gc.collect()  # so that no two models are in memory
    return logits
