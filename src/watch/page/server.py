"""The page's server: files of the page, and answers as JSON. It reads, and only for whoever has the token.

The token is the first part of every path, so no cookie is sent to other ports of this machine. A request is
answered if it names this machine, is a GET, and has the token; the page loads nothing from anywhere else.
"""

import dataclasses
import hmac
import json
import logging
import math
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cairn.checkpoint.manifest import CheckpointError
from cairn.run.errors import CairnError, UsageError
from cairn.run.files import DamagedFile
from cairn.watch.page.api import RunApi, UnknownRun
from cairn.watch.page.curves import AXES, MOST_POINTS
from cairn.watch.page.rollout_index import SORTS, RolloutQuery

logger = logging.getLogger(__name__)

HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""What a browser may call this machine; the port is free, since ssh -L may give another."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
MOST = 500
"""Rollouts of a page of a list, at most."""
LOCKED = (
    "401: this address lacks the token. Open the address that `dash` has printed; it is another each time.\n"
)


class TokenGuard:
    """Lets requests through that are for this machine, GET, and have the token; the rest learn nothing."""

    def __init__(self, app: ASGIApp, token: str):
        self.app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # a web socket
            await send({"type": "websocket.close", "code": 1008})
            return
        if (refused := self._refused(scope)) is not None:
            await refused(scope, receive, send)
            return
        path = "/" + scope["path"].split("/", 2)[2]
        await self.app({**scope, "path": path, "raw_path": path.encode(errors="replace")}, receive, send)

    def _refused(self, scope: Scope) -> Response | None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or _name_of(hosts[0]) not in HOSTS:
            return _plain("403: this page answers to 127.0.0.1 and localhost only.\n", 403)
        if scope["method"] != "GET":
            return _plain("405: this page is only read.\n", 405, {"allow": "GET"})
        parts = scope["path"].split("/", 2)
        given = parts[1].encode(errors="replace") if len(parts) == 3 else b""
        if not hmac.compare_digest(given, self._token):
            return _plain(LOCKED, 401, {"www-authenticate": "Token"})
        return None


def _name_of(host: str) -> str:
    """The name in a Host header, without its port."""
    name, colon, port = host.rpartition(":")
    return name.lower() if colon and port.isdigit() else host.lower()


def _plain(text: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
    return PlainTextResponse(text, status, headers={**HEADERS, **(headers or {})})


def make_app(api: RunApi, token: str) -> ASGIApp:
    """The server of all runs that `api` knows."""
    routes = [Route(f"/api/{name}", _endpoint(ask), methods=["GET"]) for name, ask in _questions(api).items()]
    routes += [Route("/{name:path}", _static, methods=["GET"])]
    return TokenGuard(Starlette(routes=routes), token)


async def _static(request: Request) -> Response:
    """A file of the page: of those in the package and no others."""
    name = request.path_params["name"] or "index.html"
    folder = resources.files("cairn.watch.page") / "static"
    known = {entry.name: entry for entry in folder.iterdir() if Path(entry.name).suffix in TYPES}
    if name not in known:
        return _plain("404: there is no such file of the page.\n", 404)
    kind = TYPES[Path(name).suffix]
    return Response(known[name].read_bytes(), media_type=kind, headers=HEADERS)


def _endpoint(ask: Callable[["QueryArguments"], object]) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        status = 200
        try:
            content = await run_in_threadpool(_asked, ask, QueryArguments(request.query_params))
        except UnknownRun as error:
            content, status = _json({"error": str(error)}), 404
        except (UsageError, BadQuery) as error:
            content, status = _json({"error": str(error)}), 400
        except (DamagedFile, CheckpointError) as error:
            content, status = _json({"error": str(error)}), 422
        except (CairnError, OSError) as error:
            content, status = _json({"error": str(error)}), 500
        except Exception as error:  # files in a state that nobody has thought of are no reason to end
            logger.exception("a question failed: %s", request.url.path)
            content, status = _json({"error": f"can't be shown: {type(error).__name__}: {error}"}), 500
        return Response(content, status, media_type="application/json", headers=HEADERS)

    return answer


def _asked(ask: Callable[["QueryArguments"], object], arguments: "QueryArguments") -> bytes:
    return _json(ask(arguments))


class BadQuery(Exception):
    """A part of the question can't be understood; the message names it."""


class QueryArguments:
    """The query of a request, read as what is expected."""

    def __init__(self, given: Mapping[str, str]):
        self._given = given

    def text(self, name: str, default: str | None = None) -> str:
        """A text. Raises BadQuery if there is none, and no default."""
        found = self._given.get(name, default)
        if found is None:
            raise BadQuery(f"{name} is missing")
        return found

    def word(self, name: str) -> str | None:
        """A text; None if it is empty or not there."""
        return self._given.get(name) or None

    def whole(self, name: str, default: int | None = None, most: int | None = None) -> int | None:
        """A whole number."""
        found = self.word(name)
        try:
            value = default if found is None else int(found)
        except ValueError:
            raise BadQuery(f"{name} = {found!r} is no whole number") from None
        if value is not None and abs(value) > (1 << 53):
            raise BadQuery(f"{name} = {found!r} is too large")
        return value if most is None or value is None else max(min(value, most), 0)

    def count(self, name: str, default: int | None = None, most: int | None = None) -> int:
        """A whole number that must be there, unless there is a default."""
        found = self.whole(name, default, most)
        if found is None:
            raise BadQuery(f"{name} is missing")
        return found

    def number(self, name: str) -> float | None:
        """A number."""
        found = self.word(name)
        try:
            return None if found is None else float(found)
        except ValueError:
            raise BadQuery(f"{name} = {found!r} is no number") from None

    def flag(self, name: str) -> bool | None:
        """`1` or `0`; None if it is not there."""
        found = self.word(name)
        if found not in (None, "0", "1"):
            raise BadQuery(f"{name} = {found!r} is neither 0 nor 1")
        return None if found is None else found == "1"

    def choice(self, name: str, choices: tuple[Any, ...], default: Any) -> Any:
        """One of several texts."""
        found = self.word(name) or default
        if found not in choices:
            raise BadQuery(f"{name} = {found!r}: there are {', '.join(choices)}")
        return found


def _questions(api: RunApi) -> dict[str, Callable[[QueryArguments], object]]:
    """What can be asked, by the last part of the path."""

    def query(a: QueryArguments) -> RolloutQuery:
        return RolloutQuery(
            first_step=a.whole("first_step"),
            last_step=a.whole("last_step"),
            environment=a.word("environment"),
            problem=a.whole("problem"),
            place=a.whole("place"),
            reward_from=a.number("reward_from"),
            reward_to=a.number("reward_to"),
            failed=a.flag("failed"),
            trained=a.flag("trained"),
            end=a.word("end"),
            text=a.text("text", ""),
            sort=a.choice("sort", SORTS, "newest"),
        )

    def points(a: QueryArguments) -> object:
        keys = a.text("keys").split(",")
        most = a.count("most", MOST_POINTS, MOST_POINTS * 100)
        axis = a.choice("axis", AXES, "step")
        return api.points(a.text("run"), keys, axis, a.number("first"), a.number("last"), most)

    def key(a: QueryArguments) -> tuple[str, int, int, int]:
        return a.text("run"), a.count("step"), a.count("place"), a.count("sample")

    return {
        "runs": lambda a: {"folder": api.name, "runs": api.runs()},
        "pulse": lambda a: api.pulse(a.text("run")),
        "overview": lambda a: api.overview(a.text("run")),
        "keys": lambda a: api.keys(a.text("run")),
        "points": points,
        "row": lambda a: api.row(a.text("run"), a.count("step")),
        "evaluations": lambda a: api.evaluations(a.text("run")),
        "flips": lambda a: api.flips(a.text("run"), a.text("name"), a.count("before"), a.count("after")),
        "rollouts": lambda a: api.rollouts(
            a.text("run"), query(a), a.count("begin", 0, 1 << 40), a.count("count", 50, MOST)
        ),
        "prompts": lambda a: api.prompts(a.text("run"), a.count("step")),
        "group": lambda a: api.group(a.text("run"), a.count("step"), a.count("place")),
        "conversation": lambda a: api.conversation(*key(a), whole=bool(a.flag("whole"))),
        "tokens": lambda a: api.tokens(*key(a), turn=a.count("turn", 0)),
        "discarded": lambda a: api.discarded(a.text("run")),
        "account": lambda a: api.account(a.text("run")),
        "checkpoints": lambda a: api.checkpoints(a.text("run")),
        "goodput": lambda a: api.goodput(a.text("run")),
        "timeline": lambda a: api.timeline(a.text("run"), a.count("last", 500, 100_000)),
        "logs": lambda a: api.logs(a.text("run")),
        "log": lambda a: api.log(a.text("run"), a.text("name"), a.whole("before")),
    }


def _json(value: object) -> bytes:
    """A value as JSON; numbers that JSON does not have are the texts NaN, Infinity and -Infinity."""
    return json.dumps(plain(value), allow_nan=False).encode()


def plain(value: Any) -> Any:
    """The value with nothing but what JSON has."""
    match value:
        case None | bool() | str() | int():
            return value
        case float():
            return (
                value if math.isfinite(value) else "NaN" if value != value else f"{'-' * (value < 0)}Infinity"
            )
        case Mapping():
            return {str(name): plain(one) for name, one in value.items()}
        case list() | tuple() | set():
            return [plain(one) for one in value]
        case np.generic():
            return plain(value.item())
        case bytes():
            return value.decode(errors="replace")
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {one.name: plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
        case _:
            return str(value)
