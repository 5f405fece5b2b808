"""The answers of a run as people read them: a group side by side, and one conversation with its tokens."""

import contextlib
import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.config.orchestrator import AdvantageConfig
from cairn.orchestrator.advantages import BUILT_IN, batch_samples, have_spread, make_advantage
from cairn.orchestrator.rollout_log import KeptRollouts, Row, question
from cairn.orchestrator.rollouts import AnswerGroup, Rollout
from cairn.run.errors import CairnError
from cairn.run.files import DamagedFile
from cairn.run.jsonlines import as_object
from cairn.run.trained_tokens import Array
from cairn.watch.trained_tokens import StepTokens, step_of

LISTED = ("step", "place", "sample", "problem", "environment", "trained", "policy_step", "prompt", "text",
          "reward", "parts", "failed", "finish_reason", "tokens", "seconds")  # fmt: skip
"""What is read of the rollouts of a list."""
NEEDED = ("problem", "environment", "reward", "failed", "finish_reason")
"""Columns without which a group can't be shown."""
BEGINNING = 20_000
"""Characters of a text that are sent at first; the page asks for the whole if somebody wants it."""
CELL = 300
"""Characters of a question or answer in a list."""
MOST_TOKENS = 20_000
"""Tokens of an answer that are sent one by one."""


@dataclass(frozen=True)
class PromptOfStep:
    """A prompt of a step, with how its answers did; `rewards` are in the order of samples.

    flat: whether it has several rewarded answers, and all have the same reward but for rounding.
    """

    step: int
    place: int
    problem: int
    environment: str
    question: str
    rewards: Sequence[float | None]
    trained: bool
    failed: int
    flat: bool


@dataclass(frozen=True)
class TextPart:
    """The beginning of a text, and how many characters it has in all."""

    text: str
    characters: int


@dataclass(frozen=True)
class AdvantageNote:
    """How the advantages that are shown came about.

    exact: computed as the orchestrator does, from the rewards that were kept; otherwise only the reward minus
    the mean of its group, since `how` can't be computed again here.
    """

    how: str
    exact: bool


def listed(row: Row, searched: str = "") -> dict[str, Any]:
    """A rollout as a line of a list: texts cut to what fits, around the text that was searched for."""
    prompt, text = row.pop("prompt", None) or "", row.get("text") or ""
    asked = question(prompt)
    return {**row, "question": cell(asked, searched), "text": cell(text, searched), "characters": len(text)}


def cell(text: str, searched: str = "") -> str:
    """A text in one line, cut to `CELL` characters, around what was searched for if that is in it."""
    at = text.lower().find(searched.lower()) if searched else -1
    begin = max(at - CELL // 3, 0) if at > CELL // 2 else 0
    line = " ".join(text[begin : begin + 8 * CELL].split())
    line = line if len(line) <= CELL else f"{line[: CELL - 3]}..."
    return f"...{line}" if begin else line


def beginning(text: str | None, whole: bool = False) -> TextPart:
    """A text, or its beginning."""
    text = text or ""
    return TextPart(text if whole else text[:BEGINNING], len(text))


def prompts_of(rows: Sequence[Row]) -> list[PromptOfStep]:
    """The prompts of a step's rollouts, in the order of places."""
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["place"], []).append(row)
    found: list[PromptOfStep] = []
    for place, group in sorted(groups.items()):
        first = group[0]
        rewards = [row["reward"] for row in group]
        found.append(
            PromptOfStep(
                step=first["step"],
                place=place,
                problem=first["problem"],
                environment=first["environment"],
                question=cell(question(first.get("prompt") or "")),
                rewards=rewards,
                trained=any(row.get("trained") for row in group),
                failed=sum(row["failed"] is not None for row in group),
                flat=is_flat(rewards),
            )
        )
    return found


def is_flat(rewards: Sequence[float | None]) -> bool:
    """Whether there are several rewards and all are the same but for rounding."""
    known = [reward for reward in rewards if reward is not None]
    return len(known) > 1 and not have_spread(known)


# Advantages, computed again from the rewards that were kept


def advantages(
    config: Mapping[str, Any] | None, rows: Sequence[Row]
) -> tuple[dict[tuple[int, int], float], AdvantageNote]:
    """The advantage of each answer of a step, by place and sample; user code is never called for it.

    Args:
        rows: all of the step and of one environment, with their rewards.
    """
    label = rows[0]["environment"] if rows else ""
    settings = _advantage_settings(config or {}, label)
    learned = [row for row in rows if row.get("trained") and row["reward"] is not None]
    groups = _groups(learned)
    if settings is not None and settings.type in BUILT_IN:
        with contextlib.suppress(CairnError, ArithmeticError, ValueError, TypeError, KeyError):
            return _computed(settings, groups), AdvantageNote(settings.type, exact=True)
    found: dict[tuple[int, int], float] = {}
    for group in groups:
        mean = statistics.fmean(group.rewards)
        found |= {(group.place, one.seed): (one.reward or 0.0) - mean for one in group.rollouts}
    how = settings.type if settings is not None else "an advantage that is not known"
    return found, AdvantageNote(how, exact=False)


def _computed(settings: AdvantageConfig, groups: list[AnswerGroup]) -> dict[tuple[int, int], float]:
    advantage = make_advantage(settings)
    if callable(getattr(advantage, "over_batch", None)):
        raise ValueError("it weighs answers by their tokens, which are not read here")
    made = batch_samples(groups, advantage)
    found: dict[tuple[int, int], float] = {}
    for group, samples in zip(groups, made, strict=True):
        for rollout, sample in zip(group.rollouts, samples, strict=True):
            found[group.place, rollout.seed] = float(sample.columns["advantages"][-1])
    return found


def _groups(rows: Sequence[Row]) -> list[AnswerGroup]:
    """The answers as the orchestrator has them, with one token each; `seed` is the number of the sample."""
    groups: dict[int, AnswerGroup] = {}
    for row in rows:
        new = AnswerGroup(row["place"], row["problem"], row.get("policy_step") or 0, [0], [])
        rollout = Rollout(row["sample"], [0], [0.0], [], row["finish_reason"], "", row["reward"])
        rollout.parts = dict(row.get("parts") or {})
        groups.setdefault(row["place"], new).rollouts.append(rollout)
    return list(groups.values())


def _advantage_settings(config: Mapping[str, Any], label: str) -> AdvantageConfig | None:
    """The advantage of an environment, by config.json; None if it can't be known, or answers are compared by
    something else than their rewards."""
    own = as_object(config.get("orchestrator")) or config
    chosen = own.get("advantage"), own.get("overlong")
    for one in map(as_object, own.get("environments") or []):
        if label in (one.get("label"), one.get("name")):
            chosen = one.get("advantage") or chosen[0], one.get("overlong") or chosen[1]
    if as_object(chosen[1]).get("type", "learn") == "shape":
        return None
    try:
        return AdvantageConfig.model_validate(chosen[0])
    except ValueError:
        return None


# Conversations and tokens


def conversation(row: Row, *, whole: bool = False) -> list[dict[str, Any]]:
    """The turns of a rollout: what the model was shown since the last one, and its answer."""
    turns: list[dict[str, Any]] = []
    for turn in row.get("turns") or []:
        turns.append(
            {
                "branch": turn["branch"],
                "kept": turn["kept"],
                "prompt": beginning(turn["prompt"], whole),
                "text": beginning(turn["text"], whole),
                "finish_reason": turn["finish_reason"],
                "tokens": len(turn["token_ids"] or []),
                "versions": [_span(span) for span in turn["versions"] or []],
            }
        )
    return turns


def _span(span: Mapping[str, Any]) -> dict[str, Any]:
    return {**span, "step": step_of(str(span["version"]))}


def tokens_of(row: Row, turn: int, decoder: "Decoder | None", trained: StepTokens) -> dict[str, Any]:
    """The tokens that were sampled in a turn: texts, the step of the policy behind each, the server's
    logprobs, and, if that is kept of the step, what the trainer computed of them.

    Raises:
        IndexError: the rollout has no such turn.
    """
    whole = row["turns"][turn]["token_ids"] or []
    ids, found = [int(one) for one in whole[:MOST_TOKENS]], trained.of(row["turns"])[turn]
    known = {
        "trained": found.trained,
        "gaps": found.gaps,
        "ratios": found.ratios,
        "entropies": found.entropies,
    }
    return {
        "ids": ids,
        "texts": decoder.texts(ids) if decoder else None,
        "logprobs": found.sampled[:MOST_TOKENS].tolist(),
        "versions": found.versions[:MOST_TOKENS],
        "learned": bool(row.get("trained")),
        "mask": found.learned[:MOST_TOKENS].tolist() if trained.known else None,
        **{name: _shown(values) for name, values in known.items()},
        "count": len(whole),
    }


def _shown(values: Array) -> list[float] | None:
    """The first values; None if nothing is known of any token."""
    return values[:MOST_TOKENS].tolist() if np.isfinite(values).any() else None


class Decoder:
    """Texts of tokens, by a tokenizer's `tokenizer.json`.

    Raises:
        ValueError: the file can't be read as a tokenizer.
    """

    def __init__(self, path: Path):
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            raise ValueError(f"{path}: is no tokenizer that can be read: {error}") from None

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token; where several make one character, the last of them has it."""
        decode = functools.partial(self._tokenizer.decode, skip_special_tokens=False)
        found: list[str] = []
        begin = 0
        for end in range(1, len(ids) + 1):
            before, now = decode(ids[max(begin - 1, 0) : begin]), decode(ids[max(begin - 1, 0) : end])
            if now.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids) and end - begin < 8:
                found.append("")
                continue
            found.append(now[len(before) :] if now.startswith(before) else decode(ids[begin:end]))
            begin = end
        return found


def decoder_in(folders: Sequence[Path]) -> Decoder | None:
    """The decoder of the first of these model folders that has one."""
    for folder in folders:
        path = folder / "tokenizer.json"
        if path.is_file():
            with contextlib.suppress(ValueError):
                return Decoder(path)
    return None


def rows_of_step(kept: KeptRollouts, step: int) -> list[Row]:
    """The rollouts of a step without their turns.

    Raises:
        DamagedFile: the file can't be read.
    """
    try:
        rows = kept.read(step, LISTED)
    except (pa.ArrowException, ValueError) as error:
        raise DamagedFile(f"{kept.path(step)}: can't be read: {error}") from None
    if rows and (missing := sorted(set(NEEDED) - rows[0].keys())):
        raise DamagedFile(f"{kept.path(step)}: has no column {', '.join(missing)}")
    return rows
