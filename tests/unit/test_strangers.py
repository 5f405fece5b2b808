"""Whoever connects without a run's token learns nothing, changes nothing, and delays nobody for long."""

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from runs import DEADLINE

from cairn.policy.errors import NotThere
from cairn.policy.receiver import Room, Source, WeightReceiver, read_source
from cairn.policy.sender import WeightSender
from cairn.run import connections
from cairn.run.connections import NONCE, STRANGERS, Listener, connect, receive, send
from cairn.run.messages import WEIGHT_SOURCE

HERE = "127.0.0.1"
SOON = 0.5
"""Seconds that strangers get in these tests."""


class Line(socket.socket):
    """A stranger's end of a connection; `told` is what has come over it."""

    told = b""

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        data = super().recv(bufsize, flags)
        self.told += data
        return data


Stranger = Callable[[Line, random.Random], object]
"""What one does with a connection that it has opened, or that was opened to it."""


def line_to(port: int) -> Line:
    """A connection of a stranger."""
    line = Line(fileno=socket.create_connection((HERE, port), DEADLINE).detach())
    line.settimeout(DEADLINE)
    return line


def listen_to_the_end(line: Line) -> bytes:
    """All that a stranger is told, until it is sent away."""
    with contextlib.suppress(ConnectionError):
        while line.recv(1 << 16):
            pass
    return line.told


def silent(line: Line, chance: random.Random) -> None:
    """Says nothing."""


def garbage(line: Line, chance: random.Random) -> None:
    """Anything, of any length."""
    line.sendall(chance.randbytes(chance.choice([1, NONCE - 1, NONCE, NONCE + 1, 2 * NONCE, 1 << 12])))


def other_protocol(line: Line, chance: random.Random) -> None:
    """A browser, or a scanner of ports."""
    line.sendall(b"GET / HTTP/1.1\r\nHost: trainer\r\nAuthorization: Bearer x\r\n\r\n" * 3)


def slow(line: Line, chance: random.Random) -> None:
    """A byte now and then, so that each wait is short."""
    for byte in chance.randbytes(4 * NONCE):
        line.sendall(bytes([byte]))
        time.sleep(SOON / NONCE * 2)


def mirror(line: Line, chance: random.Random) -> None:
    """Sends back what it is told, the other side's own proof above all."""
    line.sendall(chance.randbytes(NONCE))
    while data := line.recv(1 << 12):
        line.sendall(data[-NONCE:])


def echo(line: Line, chance: random.Random) -> None:
    """The same, without a number of its own."""
    while data := line.recv(1 << 12):
        line.sendall(data)


def half_closed(line: Line, chance: random.Random) -> None:
    """Says half a number, and that this was all."""
    line.sendall(chance.randbytes(NONCE // 2))
    line.shutdown(socket.SHUT_WR)


def hasty(line: Line, chance: random.Random) -> None:
    """Skips the proof and asks for what it wants."""
    line.sendall(chance.randbytes(2 * NONCE))
    with contextlib.suppress(OSError):
        send(line, {"names": ["w"]})
        send(line, {"step": 1, "base": ""})
        send(line, {"go": True})


STRANGE: list[Stranger] = [silent, garbage, other_protocol, slow, mirror, echo, half_closed, hasty]


class Crowd:
    """Strangers at a port, each in a thread."""

    def __init__(self, port: int, kinds: list[Stranger], chance: random.Random):
        self._pool = ThreadPoolExecutor(len(kinds))
        self._lines = [line_to(port) for _ in kinds]
        self._told = [
            self._pool.submit(self._be, line, kind, random.Random(chance.random()))
            for line, kind in zip(self._lines, kinds, strict=True)
        ]

    def _be(self, line: Line, kind: Stranger, chance: random.Random) -> bytes:
        with contextlib.suppress(ConnectionError):
            kind(line, chance)
        return listen_to_the_end(line)

    def told(self) -> list[bytes]:
        """What each was told, once all have been sent away."""
        told = [future.result() for future in self._told]  # a line that is not ended raises after DEADLINE
        self._pool.shutdown()
        for line in self._lines:
            line.close()
        return told


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    sender = WeightSender({"w": torch.arange(1000.0)}, rank=0, host=HERE)
    sender.offer(1)
    yield sender
    sender.close()


def get(sender: WeightSender, step: int = 1) -> torch.Tensor:
    """The policy, as a server gets it."""
    (got,) = WeightReceiver().receive(sender.source(step, [sender.here]), [["w"]])
    return got["w"]


@pytest.mark.parametrize("seed", range(3))
def test_strangers_get_nothing_and_hold_nobody_up(
    seed: int, sender: WeightSender, monkeypatch: pytest.MonkeyPatch
):
    """Servers get the policy meanwhile, the next step is made, and no thread or descriptor stays behind."""
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", SOON)
    chance = random.Random(seed)
    kinds = [*STRANGE, *(chance.choice(STRANGE) for _ in range(8))]
    chance.shuffle(kinds)
    before = threading.active_count()
    crowd = Crowd(sender.here.port, kinds, chance)
    assert torch.equal(get(sender), torch.arange(1000.0))
    sender.withdraw()
    sender.offer(2)
    assert torch.equal(get(sender, 2), torch.arange(1000.0))
    for kind, told in zip(kinds, crowd.told(), strict=True):
        assert len(told) <= (0 if kind in (silent, slow) else 2 * NONCE), "a number and a proof at most"
    _settle(lambda: threading.active_count() <= before)


def test_any_number_of_strangers_takes_few_threads_and_nobodys_turn(
    sender: WeightSender, monkeypatch: pytest.MonkeyPatch
):
    """However long they stay."""
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 100 * DEADLINE)
    get(sender)
    before, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    links: list[socket.socket] = []
    for _ in range(3):
        links += [line_to(sender.here.port) for _ in range(STRANGERS)]
        assert torch.equal(get(sender), torch.arange(1000.0))
    _settle(lambda: threading.active_count() - before <= STRANGERS + 1)
    _settle(lambda: len(os.listdir("/proc/self/fd")) - descriptors - len(links) <= STRANGERS + 1)
    assert len(links) > 2 * STRANGERS
    for link in links:
        link.close()
    _settle(lambda: threading.active_count() <= before)


class Impostor:
    """Listens where a server expects a trainer's rank, and is a stranger to each one that comes."""

    def __init__(self, kind: Stranger, chance: random.Random):
        self._socket = socket.create_server((HERE, 0))
        self.port: int = self._socket.getsockname()[1]
        self._kind, self._chance = kind, chance
        self._lines: list[Line] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                line = Line(fileno=self._socket.accept()[0].detach())
                self._lines.append(line)
                with contextlib.suppress(OSError):
                    self._kind(line, self._chance)

    def close(self) -> None:
        for link in (self._socket, *self._lines):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()


class Untouched(Room):
    """Fails if a value is about to come."""

    def place(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        raise AssertionError(f"{name} was taken from a stranger")


def at(source: Source, port: int) -> Source:
    """The same policy, with its first rank elsewhere."""
    return replace(source, ranks=[replace(source.ranks[0], port=port), *source.ranks[1:]])


@pytest.mark.parametrize("kind", STRANGE)
def test_a_server_takes_nothing_from_a_stranger_in_the_trainers_place(
    kind: Stranger, sender: WeightSender, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("cairn.policy.receiver.ANSWER", timedelta(seconds=SOON))
    impostor = Impostor(kind, random.Random(1))
    source, receiver = sender.source(1, [sender.here]), WeightReceiver()
    began = time.monotonic()
    with pytest.raises(NotThere, match=f"does not answer at {HERE}:{impostor.port}"):
        list(receiver.receive(at(source, impostor.port), [["w"]], room=Untouched()))
    assert time.monotonic() - began < DEADLINE / 2
    (got,) = receiver.receive(source, [["w"]])
    assert torch.equal(got["w"], torch.arange(1000.0))
    impostor.close()


def test_a_conversation_that_was_overheard_is_of_no_use(sender: WeightSender):
    """To neither side: each has drawn another number since."""
    overheard: list[tuple[str, bytes]] = []

    def between(line: Line, chance: random.Random) -> None:
        with socket.create_connection((HERE, sender.here.port), DEADLINE) as onward:

            def carry(one: socket.socket, other: socket.socket, side: str) -> None:
                with contextlib.suppress(OSError):
                    while data := one.recv(1 << 16):
                        overheard.append((side, data))
                        other.sendall(data)

            threading.Thread(target=carry, args=(onward, line, "rank"), daemon=True).start()
            carry(line, onward, "server")

    source = sender.source(1, [sender.here])
    spy = Impostor(between, random.Random(1))
    receiver = WeightReceiver()
    (got,) = receiver.receive(at(source, spy.port), [["w"]])
    assert torch.equal(got["w"], torch.arange(1000.0)), "who only listens sees the weights: see the docs"
    receiver.forget()
    spy.close()
    said = {side: b"".join(data for one, data in overheard if one == side) for side in ("rank", "server")}
    assert len(said["rank"]) > 4000

    with socket.create_connection((HERE, sender.here.port), DEADLINE) as again:
        again.sendall(said["server"])
        told = b""
        with contextlib.suppress(ConnectionError):
            while data := again.recv(1 << 16):
                told += data
    assert len(told) <= 2 * NONCE
    impostor = Impostor(lambda link, chance: link.sendall(said["rank"]), random.Random(1))
    with pytest.raises(NotThere, match="does not know the run's token"):
        WeightReceiver().receive(at(source, impostor.port), [["w"]], room=Untouched())
    impostor.close()


def test_each_rank_has_a_token_that_only_the_user_reads(sender: WeightSender, tmp_path: Path):
    """And that no message shows."""
    other = WeightSender({"w": torch.zeros(3)}, rank=0, host=HERE)
    assert other.here.token != sender.here.token
    with pytest.raises(NotThere, match="does not know the run's token"):
        WeightReceiver().receive(sender.source(1, [replace(sender.here, token=other.here.token)]), [["w"]])
    other.close()
    source = sender.source(1, [sender.here])
    source.write(tmp_path)
    assert (tmp_path / WEIGHT_SOURCE).stat().st_mode & 0o777 == 0o600
    assert read_source(tmp_path) == source
    assert sender.here.token not in repr(source)


def test_what_listens_can_be_closed_in_the_middle_of_a_request():
    """And whoever is connected is told."""
    answering = threading.Event()

    def answer(link: socket.socket) -> None:
        answering.set()
        receive(link)

    listener = Listener(HERE, "token", answer)
    with connect((HERE, listener.port), "token") as link:
        assert answering.wait(DEADLINE)
        listener.close(DEADLINE)
        with pytest.raises(ConnectionError):
            receive(link)
    with pytest.raises(OSError, match="refused"):
        connect((HERE, listener.port), "token")


def _settle(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)
