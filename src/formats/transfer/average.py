"""Averages of several steps' weights."""

# torch is typed in part.
# pyright: reportUnknownMemberType=false

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step_folder import MODEL
from cairn.checkpoint.tensors.layout import TensorSpec
from cairn.checkpoint.tensors.sharded_files import dtype_of
from cairn.formats import Content, Stage, TensorSource, WriteOptions, no_progress
from cairn.formats.common.verified_reads import CheckedStep
from cairn.formats.transfer.export_step import appearing, content_of_step, write_content
from cairn.run.errors import UsageError
from cairn.run.files import read_json
from cairn.run.recipe import in_one_form

VALUES = 4 << 20
"""Values of a tensor that are added at a time."""
LISTED = 20
"""Differences in an error; the rest are counted."""
IN_PASSING = {"dtype", "torch_dtype", "transformers_version", "_name_or_path"}
"""Keys of config.json that may differ between steps of the same model."""


def average_steps(
    steps: Sequence[Path],
    weights: Sequence[float],
    out: Path,
    options: WriteOptions,
    *,
    check: bool = True,
    stage: Stage = no_progress,
) -> str:
    """Write the weighted mean of the steps' weights as a Hugging Face directory.

    Values are added in float32 (float64, if that is what steps hold), and written in the data type of the
    last step or the one in `options`. Configuration and tokenizer are the last step's. Every byte that is
    read of the steps is verified.

    Args:
        weights: one for each step; they are divided by their sum.
        check: read the result back, and compare it with the average that was computed.

    Returns:
        What the check found.

    Raises:
        UsageError: `out` exists, or can't be made, or a step or the weights make no mean.
        CheckpointError: a step is damaged, or the steps have other tensors or models; the message lists them.
        OSError: a file can't be written; the error names it.
    """
    if len({step.resolve() for step in steps}) < max(len(steps), 2):
        raise UsageError("an average needs two steps or more, each given once")
    total = sum(weights)
    if len(weights) != len(steps) or not 0 < total < float("inf"):
        raise UsageError(f"{len(weights)} weights with the sum {total:g} for {len(steps)} steps")
    contents = [content_of_step(step) for step in steps]
    _check_alike(steps, contents)
    checked = [CheckedStep(step) for step in steps]
    shares = [weight / total for weight in weights]

    def mean(sources: Sequence[Mapping[str, TensorSource]]) -> Content:
        tensors = {
            name: Average(tuple(named[name] for named in sources), tuple(shares), source.spec)
            for name, source in contents[-1].tensors[MODEL].items()
        }
        return Content({MODEL: tensors}, model=contents[-1].model)

    watched = [read.watch(content.tensors[MODEL]) for read, content in zip(checked, contents, strict=True)]
    with appearing(out) as folder:
        verify = write_content(mean(watched), folder, "hf", options, stage)
        for read in checked:
            read.check(stage)
        return verify(stage) if check else "not read back"


def ema_weights(count: int, decay: float) -> list[float]:
    """The weights of an exponential moving average over so many steps, the oldest first; their sum is 1.

    It begins with the first step, and each later one enters with 1 - `decay`.
    """
    return [decay ** (count - 1 - number) * (1.0 if number == 0 else 1.0 - decay) for number in range(count)]


@dataclass(frozen=True)
class Average:
    """The weighted sum of tensors of the same shape; a `TensorSource` in the data type of the last."""

    sources: tuple[TensorSource, ...]
    shares: tuple[float, ...]
    spec: TensorSpec

    def fill(self, first: int, into: torch.Tensor) -> None:
        """See `TensorSource.fill`.

        Raises:
            Damaged: whole numbers differ, which have no mean.
        """
        for start in range(0, len(into), VALUES):
            part = into[start : start + VALUES]
            part.copy_(self._sum(first + start, len(part)))

    def _sum(self, first: int, count: int) -> torch.Tensor:
        dtypes = [dtype_of(source) for source in self.sources]
        total = torch.zeros(count, dtype=torch.float64 if torch.float64 in dtypes else torch.float32)
        kept: torch.Tensor | None = None
        for source, share, dtype in zip(self.sources, self.shares, dtypes, strict=True):
            values = torch.empty(count, dtype=dtype)
            source.fill(first, values)
            if dtype.is_floating_point:
                total.add_(values.to(total.dtype), alpha=share)
            elif kept is not None and not torch.equal(values, kept):
                raise Damaged(f"{self.spec.name}: holds whole numbers, which differ between the steps")
            else:
                kept = values
        return total if kept is None else kept


def _check_alike(steps: Sequence[Path], contents: Sequence[Content]) -> None:
    """Check that all steps are of the same model."""
    last = contents[-1].tensors[MODEL]
    config = _config(contents[-1])
    for step, content in zip(steps, contents, strict=True):
        ours, other = content.tensors[MODEL], _config(content)
        problems = [f"{name} is only in {step}" for name in sorted(ours.keys() - last.keys())]
        problems += [f"{name} is only in {steps[-1]}" for name in sorted(last.keys() - ours.keys())]
        problems += [
            f"{name} is {_kind(ours[name])} and {_kind(last[name])}"
            for name in sorted(ours.keys() & last.keys())
            if _kind(ours[name]) != _kind(last[name])
        ]
        problems += [
            f"config.json: {key} is {json.dumps(other.get(key))} and {json.dumps(config.get(key))}"
            for key in sorted((config.keys() | other.keys()) - IN_PASSING)
            if config.get(key) != other.get(key)
        ]
        if problems:
            more = f"; and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
            raise CheckpointError(
                f"{step} and {steps[-1]} are of different models: {'; '.join(problems[:LISTED])}{more}"
            )


def _kind(source: TensorSource) -> str:
    """What has to be the same in all steps: the shape, and whether values are whole numbers."""
    return f"{'' if dtype_of(source).is_floating_point else 'whole numbers '}{list(source.spec.shape)}"


def _config(content: Content) -> dict[str, Any]:
    found = read_json(content.model / "config.json", dict[str, Any]) if content.model else None
    return in_one_form(found or {})
