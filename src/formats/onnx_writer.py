"""Exports a model with torch.onnx, and runs it with onnxruntime."""

# torch and transformers are typed in part; onnxruntime is optional.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false

import contextlib
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.tensors.reader import DTYPES
from cairn.formats.base import Content, WriteOptions, needed
from cairn.formats.common.match_layout import outgoing_weights
from cairn.formats.common.verified_reads import KeptValues
from cairn.run.files import naming
from cairn.run.output import Stage

EXTERNAL_BYTES = 1_900_000_000
"""More bytes of weights are in a file of their own: one file of protobuf holds 2 GB at most."""
GROUP = "formats"
INPUTS = ["input_ids", "attention_mask"]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Of the largest logit, by the data type that the model computes in."""
SHAPES = ((2, 16), (1, 7), (3, 33))
"""Batch and length of the inputs that are compared; the first row of each has padding on the left."""


class _Logits(torch.nn.Module):
    """A model as a function from tensors to a tensor, without a cache."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The logits: [batch, seq, vocabulary]."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


def write(content: Content, path: Path, options: WriteOptions) -> None:
    """Write the model; see `onnx.Onnx.write`."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        needed(package, GROUP)
    model = _model(content, options)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    longest = getattr(model.config, "max_position_embeddings", None) or 1 << 20
    # torch makes an axis of length 1 a constant.
    example = _inputs(2, min(16, longest), model.config.vocab_size)
    axes = {0: torch.export.Dim("batch", min=1, max=1 << 20), 1: torch.export.Dim("seq", min=1, max=longest)}
    with naming(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.onnx.export(
                _Logits(model),
                tuple(example.values()),
                path,
                dynamo=True,
                input_names=INPUTS,
                output_names=["logits"],
                dynamic_shapes=(axes, axes),
                external_data=nbytes > EXTERNAL_BYTES,
                opset_version=20,
                verbose=False,
            )
        except OSError:
            raise
        except Exception as error:  # torch raises many kinds
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                f"torch can't express a {type(model).__name__} in ONNX: {reason}"
            ) from error


def largest_difference(content: Content, path: Path, stage: Stage) -> float:
    """The largest difference between logits of the file in onnxruntime and of transformers.

    Returns:
        The difference as a share of the largest logit.
    """
    runtime = needed("onnxruntime", GROUP)
    folder = _folder(content)
    progress = stage("running in onnxruntime", len(SHAPES))
    try:
        options = runtime.SessionOptions()
        options.log_severity_level = 4
        session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        dtype = {"tensor(float16)": torch.float16, "tensor(bfloat16)": torch.bfloat16}.get(
            session.get_outputs()[0].type, torch.float32
        )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        longest = getattr(model.config, "max_position_embeddings", None) or max(n for _, n in SHAPES)
        differences = [0.0]
        for batch, length in SHAPES:
            inputs = _inputs(batch, min(length, longest), model.config.vocab_size)
            (found,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
            with torch.no_grad():
                expected = _Logits(model)(**inputs).float()
            seen = inputs["attention_mask"].bool()
            apart = (torch.from_numpy(found).float() - expected)[seen].abs().max()
            differences.append(float(apart / expected[seen].abs().max()))
            progress(1)
    except RuntimeError as error:
        raise _not_run(path, error) from None
    except Exception as error:  # onnxruntime's own kinds have no common one
        if type(error).__module__.startswith("onnxruntime"):
            raise _not_run(path, error) from None
        raise
    if not max(differences) <= TOLERANCE[dtype]:
        raise Damaged(
            f"{path}: onnxruntime computes other logits: they differ by {max(differences):.1e} of the largest"
        )
    return max(differences)


def _not_run(path: Path, error: Exception) -> CheckpointError:
    reason = (str(error).strip().splitlines() or [""])[0]
    return CheckpointError(
        f"{path}: onnxruntime can't run it here (it has no bfloat16 on CPUs, for one); try --dtype "
        f"float32, or --no-verify to leave out this check: {reason}"
    )


def _model(content: Content, options: WriteOptions) -> PreTrainedModel:
    """The step's model, in the data type asked for.

    Raises:
        CheckpointError: there is no config.json, or the weights do not fit it.
    """
    weights, _ = outgoing_weights(KeptValues(content, options.dtype).content)
    dtypes = {weight.dtype for weight in weights.values() if weight.dtype.is_floating_point}
    dtype = DTYPES[options.dtype] if options.dtype else max(dtypes, key=lambda each: each.itemsize)
    config: Any = AutoConfig.from_pretrained(_folder(content))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    with contextlib.suppress(AttributeError, ValueError):  # models without experts
        model.set_experts_implementation("batched_mm")  # eager's loop over the experts can't be exported
    state = model.state_dict()
    with torch.no_grad():
        for name, weight in weights.items():
            state[name].copy_(weight.read())
            options.on_bytes(weight.source.spec.nbytes)
    return model.requires_grad_(False)


def _folder(content: Content) -> Path:
    """The folder with config.json."""
    if content.model is None:
        raise CheckpointError("there is no config.json, which describes the graph")
    return content.model


def _inputs(batch: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """Token numbers, spread over the vocabulary, and a mask; a quarter of the first row is padding."""
    ids = (torch.arange(batch * length).reshape(batch, length) * 7919 + 11) % vocabulary
    mask = torch.ones_like(ids)
    mask[0, : length // 4] = 0
    return dict(zip(INPUTS, (ids, mask), strict=True))
