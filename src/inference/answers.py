"""What the server's answers to requests for tokens hold, and which policy each token comes from."""

from typing import Any

from cairn.policy.generation import Generation, ServedAdapter, VersionSpan


def naming(adapter: ServedAdapter | None) -> dict[str, str]:
    """What the body of a request has besides, to be answered from an adapter."""
    return {} if adapter is None else {"model": adapter.name}


def check_answered_by(adapter: ServedAdapter | None, answer: dict[str, Any]) -> None:
    """Check that an answer comes from the adapter that its request has named.

    Raises:
        ValueError, KeyError: it comes from another, or does not say.
    """
    if adapter is not None and answer["model"] != adapter.name:
        raise ValueError(f"an answer from {answer['model']} instead of {adapter.name}")


def generation_spans(choice: dict[str, Any], adapter: ServedAdapter | None) -> list[VersionSpan]:
    """Which policies the tokens of a choice come from.

    Of an adapter's, vLLM tells the version of the weights beside it.
    """
    if adapter is not None:
        return [VersionSpan(adapter.version, 0, len(choice["token_ids"]))] if choice["token_ids"] else []
    return [VersionSpan(**span) for span in choice["weight_versions"] or []]


def read_generation(choice: dict[str, Any], adapter: ServedAdapter | None) -> Generation:
    """A choice of the server's answer.

    Raises:
        ValueError, KeyError, TypeError: it is not whole: a token lacks its logprob or its version.
    """
    token_ids = choice["token_ids"]
    logprobs = [token["logprob"] for token in (choice["logprobs"] or {}).get("content") or []]
    spans = generation_spans(choice, adapter)
    if len(logprobs) != len(token_ids):
        raise ValueError(f"{len(logprobs)} logprobs of {len(token_ids)} tokens")
    covered = 0
    for span in spans:
        if span.start != covered:
            raise ValueError(f"no weight version of token {covered}")
        covered = span.end
    if covered != len(token_ids):
        raise ValueError(f"weight versions of {covered} tokens out of {len(token_ids)}")
    stop = choice.get("stop_reason")
    return Generation(
        token_ids, logprobs, spans, choice["finish_reason"], stop if isinstance(stop, str) else None
    )
