"""A loopback endpoint that speaks OpenAI's API, for agents that know only a URL."""

from cairn.endpoint.asked import MODEL_NAME, Asked, Rules, UnanswerableRequest
from cairn.endpoint.server import Endpoint
from cairn.endpoint.session import ChatModel, Reply, Session

__all__ = ["MODEL_NAME", "Asked", "ChatModel", "Endpoint", "Reply", "Rules", "Session", "UnanswerableRequest"]
