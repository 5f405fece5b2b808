"""A loopback endpoint that speaks OpenAI's API, for agents that know only a URL.

The server itself is `cairn.endpoint.server`, which imports aiohttp.
"""

from cairn.endpoint.asked import MODEL_NAME, Asked, Rules, UnanswerableRequest
from cairn.endpoint.session import ChatModel, Reply, Session

__all__ = ["MODEL_NAME", "Asked", "ChatModel", "Reply", "Rules", "Session", "UnanswerableRequest"]
