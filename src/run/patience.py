"""Early stopping: the best result of each validation, and whether a run waits for a better one."""

from collections.abc import Mapping


def better(best: Mapping[str, float] | None, step: int, loss: float) -> dict[str, float]:
    """The best result so far with this one: its `loss` and `step`, and how many came `since`."""
    if best is None or loss < best["loss"]:
        return {"loss": loss, "step": step, "since": 0}
    return {**best, "since": best["since"] + 1}


def why_exhausted(best: Mapping[str, Mapping[str, float]], patiences: Mapping[str, int]) -> str | None:
    """Why a run ends before its last step: a validation's loss falls no more. None if it does not.

    Args:
        best: the best result of each validation, as checkpoints hold it.
        patiences: of the validations that may end the run.
    """
    for name, patience in patiences.items():
        found = best.get(name)
        if found and found["since"] >= patience:
            return (
                f"validation {name!r} had its lowest loss, {found['loss']:.5g}, after step "
                f"{int(found['step'])}, and none lower in the {int(found['since'])} since then "
                f"(patience = {patience})"
            )
    return None
