"""Advantages: how much better each answer is than the other answers to its prompt; one file an algorithm.

The policy loss weights every token with its advantage. `advantage.type` is a key of `BUILT_IN`, a plug-in or
`module:Class`, and `advantage.args` go to its constructor; `Advantage` says what its objects are called with.
"""

import inspect
from collections.abc import Callable
from typing import Any

from cairn.config.orchestrator import AdvantageConfig
from cairn.orchestrator.advantages.advantage import (
    Advantage,
    AdvantageFailed,
    Values,
    column_of,
    differ,
    have_spread,
    teaches,
)
from cairn.orchestrator.advantages.gae import Gae
from cairn.orchestrator.advantages.gdpo import Gdpo
from cairn.orchestrator.advantages.grpo import DrGrpo, Grpo
from cairn.orchestrator.advantages.maxrl import MaxRL
from cairn.orchestrator.advantages.none import NoAdvantage
from cairn.orchestrator.advantages.reinforce import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from cairn.orchestrator.advantages.rloo import Rloo
from cairn.orchestrator.advantages.samples import batch_samples, complete_experts, to_samples
from cairn.run.extensions import BadExtension, load, make

__all__ = [
    "BUILT_IN",
    "Advantage",
    "AdvantageFailed",
    "Grpo",
    "Values",
    "batch_samples",
    "column_of",
    "complete_experts",
    "differ",
    "have_spread",
    "make_advantage",
    "teaches",
    "to_samples",
]

BUILT_IN: dict[str, Callable[..., Any]] = {
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "rloo": Rloo,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaseline,
    "maxrl": MaxRL,
    "gdpo": Gdpo,
    "gae": Gae,
    "none": NoAdvantage,
}
"""By type; docs/reference/algorithms.md has their formulas."""


def make_advantage(config: AdvantageConfig) -> Advantage:
    """The built-in advantage or plug-in of that name, or `module:Class`, made with the configured arguments.

    Raises:
        BadExtension: it does not exist, its constructor fails, or it can't be called with a group.
    """
    setting = "orchestrator.advantage.type"
    cls = load(config.type, BUILT_IN, setting, group="cairn.advantages")
    advantage = make(cls, config.args, "orchestrator.advantage.args")
    try:
        inspect.signature(advantage).bind("group")
    except TypeError as error:
        raise BadExtension(
            f"{setting} = {config.type!r}: its objects can't be called with a group of answers, as "
            f"__call__(group): {error}"
        ) from None
    except ValueError:
        pass  # inspect knows no signature of it
    return advantage
