"""What stands before the server's routes: the token, and the size of a request."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from cairn.inference.plugin.middleware import MAX_BODY, MAX_TEXT, OPEN_ROUTES, TEXT_ROUTES, Guard

TOKEN = "secret"
PATHS = (
    *("/health", "/inference/v1/generate", "/scale_elastic_ep", "/cairn/update_weights"),
    *sorted(TEXT_ROUTES),
)


def ask(method: str, path: str, **options: object) -> tuple[httpx.Response, list[int]]:
    """The answer, and the sizes of the bodies that the routes have seen."""
    seen = []

    async def route(request: Request) -> PlainTextResponse:
        seen.append(len(await request.body()))
        return PlainTextResponse("done")

    app = Starlette(routes=[Route(path, route, methods=["GET", "POST"]) for path in PATHS])
    guarded = Guard(app, TOKEN, "ask the person who started it", max_body=1000, max_text=100)

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app=guarded)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, **options)

    return asyncio.run(main()), seen


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("POST", "/inference/v1/generate")])
def test_generation_and_health_are_open(method: str, path: str):
    answer, seen = ask(method, path, content=b"x" * 10)
    assert (answer.status_code, seen) == (200, [10])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/scale_elastic_ep"),
        ("POST", "/cairn/update_weights"),
        ("POST", "/health"),
        ("GET", "/inference/v1/generate"),
        ("GET", "/no/such/route"),
        ("POST", "//inference/v1/generate"),
    ],
)
def test_everything_else_needs_the_token_before_anything_is_read(method: str, path: str):
    read = []

    async def body() -> AsyncIterator[bytes]:
        read.append(1)
        yield b"{"

    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": b"Bearer \xff"}):
        answer, seen = ask(method, path, headers=headers, content=body())
        assert (answer.status_code, seen, read) == (401, [], [])
        assert "ask the person who started it" in answer.json()["error"]["message"]
    answer, _ = ask(method, path, headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code != 401


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large_is_refused(announced: bool):
    async def body() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b"x" * 100

    answer, seen = ask("POST", PATHS[1], content=b"x" * 1100 if announced else body())
    assert (answer.status_code, seen) == (413, [])
    assert "more than 1000 bytes" in answer.json()["error"]["message"]
    assert ask("POST", PATHS[1], content=b"x" * 1000)[1] == [1000]


@pytest.mark.parametrize("path", sorted(TEXT_ROUTES))
def test_text_is_bounded_more_tightly(path: str):
    """One thread tokenises it, for which the text of everybody else waits; token ids need no such thread."""
    answer, seen = ask("POST", path, content=b"x" * 101)
    assert (answer.status_code, seen) == (413, [])
    assert "more than 100 bytes" in answer.json()["error"]["message"]
    assert ask("POST", path, content=b"x" * 100)[1] == [100]
    assert OPEN_ROUTES["POST"] - TEXT_ROUTES == {"/inference/v1/generate"}
    assert MAX_TEXT < MAX_BODY
