"""How the answers to a prompt come about: what completes a group, by the kind of its environment."""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.chat import ChatFormat
from cairn.orchestrator.environments import (
    AskedElsewhere,
    AskedEnvironment,
    GroupRewarded,
    Programs,
    SingleTurn,
)
from cairn.orchestrator.group_sampling import GroupSampler
from cairn.orchestrator.ledger import Ledger
from cairn.orchestrator.programs import ProgramRunner
from cairn.orchestrator.retrying import Retrying
from cairn.orchestrator.rollouts import AnswerGroup
from cairn.orchestrator.sampling import Sampler
from cairn.orchestrator.servers import GeneratingServers


class Answering(Protocol):
    """Completes the answers to prompts."""

    retrying: Retrying
    """What tries an environment's calls again."""

    async def complete(self, group: AnswerGroup) -> AnswerGroup:
        """Have the answers of the group that are missing or partial generated and rewarded.

        All that is generated or rewarded is in the ledger before anything is built on it, so that a group
        that was interrupted is completed without doing any of it again.
        """
        ...


class ByEnvironment:
    """Completes each group by what its environment needs. `answering` is in the order of the environments."""

    def __init__(self, answering: Sequence[Answering]):
        self._answering = answering
        self.retrying = [one.retrying for one in answering]
        """Of each environment."""

    async def complete(self, group: AnswerGroup) -> AnswerGroup:
        return await self._answering[group.environment].complete(group)


ANSWERING: dict[type[AskedEnvironment], Callable[..., Answering]] = {
    SingleTurn: Sampler,
    AskedElsewhere: Sampler,
    GroupRewarded: GroupSampler,
    Programs: ProgramRunner,
}
"""What completes the groups of an environment, by how it is asked; a kind without a row is as its base is."""


def make_answering(
    config: OrchestratorConfig,
    environment: AskedEnvironment,
    chat: ChatFormat,
    servers: GeneratingServers,
    ledger: Ledger,
    versions: Collection[str],
) -> Answering:
    """What completes the groups of this environment.

    Args:
        versions: the policy versions that tokens may come from; the caller may change the set at any time.
    """
    kind = next(base for base in type(environment).__mro__ if base in ANSWERING)
    return ANSWERING[kind](config, environment, chat, servers, ledger, versions)
