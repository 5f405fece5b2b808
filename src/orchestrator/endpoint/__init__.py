"""A loopback endpoint that speaks OpenAI's API, for agents that know only a URL."""

from cairn.orchestrator.endpoint.asked import MODEL_NAME, Asked, Rules, UnanswerableRequest
from cairn.orchestrator.endpoint.server import Endpoint
from cairn.orchestrator.endpoint.session import Session

__all__ = ["MODEL_NAME", "Asked", "Endpoint", "Rules", "Session", "UnanswerableRequest"]
