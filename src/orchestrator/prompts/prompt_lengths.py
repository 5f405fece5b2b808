"""What template and lengths make of a run's prompts, before it starts: problems that can't be asked, and
rollouts that are longer than what the trainer learns from."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cairn.orchestrator.completion.chat import ChatFormat
from cairn.run.conversations import NoPrompt
from cairn.run.errors import UsageError


def context_by(model: Path) -> int | None:
    """The largest context of a model, by its config.json: a server's default."""
    try:
        config: dict[str, Any] = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        return None
    own = config.get("text_config")
    found = (own if isinstance(own, dict) else config).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def look_at_prompts(
    facts: Mapping[str, Any], chat: ChatFormat, *, seq_len: int, cut_rollouts: bool, flags: str
) -> Iterator[str]:
    """Render what is known of a run's prompts, and compare lengths.

    Args:
        facts: `asked`, a table for each environment (`launch.problems`). `context`: maximum tokens of a
            prompt and its answer on the servers, None if unknown. `smaller_context`: how to make that
            smaller, in words.
        seq_len: tokens of a rollout that are learned.
        cut_rollouts: whether what is behind them may be lost.
        flags: what the flags of the trainer's settings begin with.

    Returns:
        Notices, each a line.

    Raises:
        UsageError: no problem of an environment can be asked, or a rollout may be too long to be learned.
    """
    context, errors = facts["context"], list[str]()
    for one in facts["asked"]:
        whose, lengths = one["whose"], dict[int, int]()
        problems = {prompt["problem"]: prompt for prompt in one["prompts"]}
        unusable: dict[int, str] = {}
        for problem, prompt in problems.items():
            try:
                length = len(chat.prompt(prompt["messages"], prompt["tools"]))
            except NoPrompt as error:
                unusable[problem] = str(error)
                continue
            if context is not None and length >= context:
                unusable[problem] = (
                    f"its prompt has {length} tokens, but prompt and answer together may have at most "
                    f"{context} on the servers (--max-model-len; on rl, --inference.max-model-len)"
                )
            else:
                lengths[problem] = length
        if unusable:
            first = next(iter(unusable))
            sentence = f"{whose}, problem {first}: {unusable[first]}"
            if not lengths:
                errors.append(sentence)
                continue
            yield (
                f"warning: {len(unusable)} of {len(problems)} problems that were looked at can't be asked: "
                f"{sentence}"
            )
        if one["trained"] and not cut_rollouts:
            errors += _too_long(one, lengths, facts, seq_len, flags)
    if errors:
        raise UsageError("\n".join(errors))


def _too_long(
    one: Mapping[str, Any], lengths: Mapping[int, int], facts: Mapping[str, Any], seq_len: int, flags: str
) -> Iterator[str]:
    """Why an environment's rollouts may be longer than what is learned of them; nothing if they are not."""
    context, whose, smaller = facts["context"], one["whose"], facts["smaller_context"]
    lost = "what is behind that would be sampled and rewarded, and never learned"
    ways = f"{flags}cut-rollouts allows it"
    if not one["one_answer"]:
        if context is not None and context > seq_len:
            yield (
                f"{flags}seq-len {seq_len}: a rollout of {whose} may fill the servers' context, {context} "
                f"tokens; {lost}. Give {flags}seq-len {context}, or a smaller context ({smaller}); {ways}"
            )
        return
    problem = max(lengths, key=lambda one: lengths[one], default=0)
    longest = lengths.get(problem, 0)
    whole = longest + one["max_tokens"]
    whole = whole if context is None else min(whole, context)
    if lengths and whole > seq_len:
        yield (
            f"{flags}seq-len {seq_len}: problem {problem} of {whose} has a prompt of {longest} tokens, and "
            f"its answer may have {whole - longest} (sampling.max_tokens, within the servers' context); "
            f"{lost}. Give {flags}seq-len {whole}, or shorter answers; {ways}"
        )
