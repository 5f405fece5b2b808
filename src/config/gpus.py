"""The type of settings that name GPUs: a number of them, or a list as in CUDA_VISIBLE_DEVICES."""

from typing import Annotated, Any, cast

from pydantic import BeforeValidator


def names_in(value: str) -> tuple[str, ...] | None:
    """The names that a checked value lists; None if it is a number of GPUs.

    0,1 and 3, and GPU-5ab1 are lists; 3 is a number.
    """
    if value.isdecimal():
        return None
    return tuple(name for name in value.split(",") if name)


def listing(names: list[str]) -> str:
    """The value that lists `names`; 0 for none."""
    if len(names) == 1 and names[0].isdecimal():
        return f"{names[0]},"
    return ",".join(names) or "0"


def _checked(value: Any) -> Any:
    if isinstance(value, list):
        value = listing([str(name) for name in cast("list[Any]", value)])
    if isinstance(value, bool) or not isinstance(value, int | str):
        return value  # the type's own check will report it
    text = "".join(str(value).split())
    names = names_in(text)
    if text == "" or names == () or text.startswith("-"):
        raise ValueError(
            f"{value!r} is neither a number of GPUs (2) nor a list of them (0,1 or GPU-5ab1; one alone: 3,)"
        )
    if names is not None and len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{value!r} names GPU {twice} twice")
    return text


Gpus = Annotated[str | None, BeforeValidator(_checked)]
"""How many GPUs, or which; None leaves it to `cairn.launch.plan.gpu_assignment`."""
