"""Answers that another branch of the run has sampled already, taken in place of sampling new ones.

Branches (docs/how-to/branches.md) start from the same weights and ask the same prompts in the same order. So
what one of them has sampled can be learned from by another one, as long as the policies are near enough: the
answering policy may have made some steps since the common start, and the learning one some others, and both
together count as the age of the answer, which `max_off_policy_steps` bounds. The logprobs stay those of the
policy that has sampled the answer, from which losses compute their importance ratios.

What is taken is in this branch's own ledger before it is used. From then on nothing depends on the other one.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError
from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.environment_identity import same_environment
from cairn.orchestrator.ledger import Ledger, read_whole_answers
from cairn.orchestrator.rollouts import AnswerGroup, SharedFrom
from cairn.run.directory import RunDirectory
from cairn.run.files import read_note
from cairn.run.messages import PolicyName
from cairn.run.recipe import is_within, plain

logger = logging.getLogger(__name__)

OF_ANSWERS = ("environment", "sampling", "samples_per_prompt", "tool_parser", "reasoning_parser")
"""The orchestrator's settings that what is sampled, and its reward, depend on."""
OF_PROMPTS = ("model", "tokenizer", "date")
"""What the trainer's part of a recipe says of the tokens of prompts, and of what answers them."""


class Siblings:
    """The other branches of the run, and what may be taken of them."""

    def __init__(self, config: OrchestratorConfig, run: RunDirectory, ledger: Ledger):
        """Answers go from the ledgers that `config` names into `ledger`, that of the branch in `run`."""
        self._ledger = ledger
        self._since, self._bound = config.branched_at, config.max_off_policy_steps
        self._own = run
        # The experts of tokens are megabytes, and are not looked for elsewhere.
        runs = {} if config.router_replay else config.siblings
        self._runs = {name: RunDirectory(Path(path)) for name, path in runs.items()}
        self._said: set[str] = set()

    def answer(self, group: AnswerGroup, step: int) -> None:
        """Give a prompt that was just issued the answers of another branch, if one has them all.

        Args:
            group: without answers; it has them afterwards, recorded in the ledger.
            step: the batch that it will be in, so that its answers are learned from by policy `step` - 1.
        """
        left = self._bound - (step - 1 - self._since)
        if left < 0:
            return
        for name, run in self._runs.items():
            found = self._look(name, run, group, left)
            if found is not None:
                group.prompt_ids, group.rollouts = found.prompt_ids, found.rollouts
                whose = found.shared.branch if found.shared else name
                self._ledger.share(group, SharedFrom(whose, self._since))
                return

    def _look(self, name: str, run: RunDirectory, group: AnswerGroup, left: int) -> AnswerGroup | None:
        """The answers of a branch to the same prompt, by policies at most `left` steps after the start."""
        if not run.ledger.exists() or not self._fits(run):
            return None
        try:
            found = read_whole_answers(run.ledger, group.place, self._ledger.run)
        except CheckpointError as error:
            if name not in self._said:
                logger.warning("no answers are taken from branch %s: %s", name, error)
            self._said.add(name)
            return None
        if found is None or (found.problem, found.environment) != (group.problem, group.environment):
            return None
        made = [PolicyName.parse(version).step - self._since for version in found.versions]
        return found if made and all(0 <= steps <= left for steps in made) else None

    def _fits(self, run: RunDirectory) -> bool:
        """Whether the other branch's answers are what this one would have sampled from the same policy."""
        own, other = (read_note(one.recipe, dict[str, Any]) or {} for one in (self._own, run))
        ours, theirs = (recipe.get("orchestrator", {}) for recipe in (own, other))
        if "environment" not in ours or "environment" not in theirs:
            return False
        trainers = [recipe.get("trainer", {}) for recipe in (own, other)]
        return (
            same_environment(ours["environment"], theirs["environment"])
            and _settings(ours) == _settings(theirs)
            and all(trainers[0].get(name) == trainers[1].get(name) for name in OF_PROMPTS)
            and not any(_has_changed(recipe, self._since) for recipe in (ours, theirs))
        )


def _settings(recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a recipe says of answers: of the run, and of each of several environments."""
    parts = {"": recipe["settings"], **recipe.get("environments", {})}
    return [
        {name: value for name, value in settings.items() if is_within(name, frozenset(OF_ANSWERS))}
        | {"environments": label}
        for label, settings in parts.items()
    ]


def _has_changed(recipe: Mapping[str, Any], since: int) -> bool:
    """Whether something of that was changed since: the ledger may have answers from before and after."""
    return any(
        change["step"] > since and not set(plain(change["name"]).split(".")).isdisjoint(OF_ANSWERS)
        for change in recipe.get("changes", [])
    )
