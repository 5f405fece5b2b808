"""What completes answers works with, whatever kind of environment rewards them."""

from collections.abc import Collection
from typing import Generic, TypeVar

from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.chat import ChatFormat
from cairn.orchestrator.environments import AskedEnvironment, EnvironmentFailed
from cairn.orchestrator.ledger import Ledger
from cairn.orchestrator.pacing import Pacing
from cairn.orchestrator.retrying import Retrying
from cairn.orchestrator.servers import GeneratingServers

Asked = TypeVar("Asked", bound=AskedEnvironment)


class PromptRefused(EnvironmentFailed):
    """A problem's messages give no usable prompt for this model and these servers; the message names it.

    That is the end of this prompt, and of no other: its answers have failed.
    """

    def __init__(self, message: str):
        super().__init__(message, passing=False)


class Completer(Generic[Asked]):
    """The base of what completes groups of answers (`Answering`)."""

    def __init__(
        self,
        config: OrchestratorConfig,
        environment: Asked,
        chat: ChatFormat,
        servers: GeneratingServers,
        ledger: Ledger,
        versions: Collection[str],
    ):
        """Prepare to complete groups.

        Args:
            versions: the policy versions that tokens may come from; the caller may change the set at any
                time.
        """
        self.config = config
        self.environment = environment
        self.chat = chat
        self.servers = servers
        self.ledger = ledger
        self.versions = versions
        self.retrying = Retrying(config)
        self.pacing = Pacing()
