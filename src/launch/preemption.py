"""Notices that this machine will be taken away, from the cloud's metadata service or a function of the user.

The forms of the answers are those of the pages "Spot Instance interruption notices" (EC2 User Guide), "Create
and use Spot VMs" (Google Compute Engine) and "Scheduled Events for Linux VMs" (Azure). No test reaches such a
service; the tests' own one answers like them.
"""

import contextlib
import datetime
import email.utils
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import httpx

from cairn.config.shared import PreemptionConfig
from cairn.run.extensions import load

logger = logging.getLogger(__name__)

LINK_LOCAL = "http://169.254.169.254"
ANSWER_SECONDS = 2.0
GCP_SECONDS = 30.0
"""Between a notice of Google's and the end of the machine."""
AZURE_EVENTS = ("Preempt", "Terminate")


@dataclass(frozen=True)
class Notice:
    """The machine will be taken away.

    reason: why. seconds: how long it stays from now on, if that is known. at_begin: the notice says how long
    the machine stays from when the notice was given, but not when that was.
    """

    reason: str
    seconds: float | None = None
    at_begin: bool = False


Ask = Callable[[], Notice | None]
"""Asks whether there is a notice."""


def on_aws(client: httpx.Client) -> Notice | None:
    """Of a spot instance of EC2: two minutes before it is stopped or terminated."""
    token = client.put("/latest/api/token", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    headers = {"X-aws-ec2-metadata-token": token.raise_for_status().text}
    answer = client.get("/latest/meta-data/spot/instance-action", headers=headers)
    if answer.status_code == httpx.codes.NOT_FOUND:
        return None
    found = answer.raise_for_status().json()
    when = datetime.datetime.fromisoformat(found["time"])
    return Notice(f"EC2 will {found['action']} this instance", when.timestamp() - time.time())


def on_gcp(client: httpx.Client) -> Notice | None:
    """Of a spot or preemptible machine of Google: half a minute before it is stopped, at most."""
    headers = {"Metadata-Flavor": "Google"}
    answer = client.get("/computeMetadata/v1/instance/preempted", headers=headers).raise_for_status()
    if answer.text.strip() != "TRUE":
        return None
    return Notice("Google preempts this machine", GCP_SECONDS, at_begin=True)


def on_azure(client: httpx.Client) -> Notice | None:
    """Of a spot machine of Azure: half a minute or more before it is evicted.

    All machines of an availability set or of a scale set's placement group are told of each other's events.
    """
    answer = client.get(
        "/metadata/scheduledevents", params={"api-version": "2020-07-01"}, headers={"Metadata": "true"}
    )
    events, name = answer.raise_for_status().json().get("Events", []), None
    with contextlib.suppress(httpx.HTTPError):  # then any event may be this machine's
        name = _azure_name(client)
    for event in events:
        machines = [machine.casefold() for machine in event.get("Resources") or []]
        if name and machines and name.casefold() not in machines:
            continue
        if event.get("EventType") in AZURE_EVENTS:
            text = event.get("NotBefore")
            when = email.utils.parsedate_to_datetime(text).timestamp() if text else time.time()
            return Notice(f"Azure: {event['EventType']}", max(when - time.time(), 0.0))
    return None


@lru_cache(maxsize=1)
def _azure_name(client: httpx.Client) -> str:
    """The name of this machine in events, in a scale set SET_N.

    Raises:
        httpx.HTTPError: the service does not tell; it is asked again the next time.
    """
    asked = {"api-version": "2021-02-01", "format": "text"}
    answer = client.get("/metadata/instance/compute/name", params=asked, headers={"Metadata": "true"})
    return answer.raise_for_status().text.strip()


CLOUDS: dict[str, Callable[[httpx.Client], Notice | None]] = {"aws": on_aws, "gcp": on_gcp, "azure": on_azure}


def asking(config: PreemptionConfig) -> Ask | None:
    """What asks for notices; None if only signals announce the end.

    Raises:
        BadExtension: there is no such cloud or function.
    """
    if config.watch is None:
        return None
    function: Callable[..., Any] = load(config.watch, CLOUDS, "preemption.watch", "function")
    if config.watch in CLOUDS:
        client = httpx.Client(base_url=config.url or LINK_LOCAL, timeout=ANSWER_SECONDS, trust_env=False)
        return partial(function, client)
    return partial(_notice_from, function, f"--preemption.watch {config.watch}")


def _notice_from(function: Callable[..., Any], flag: str) -> Notice | None:
    """The answer of a user's function: nothing, a reason, or a reason and the seconds left."""
    answer = function()
    if answer is None or answer is False:
        return None
    reason, seconds = answer if isinstance(answer, tuple) else (answer, None)
    if not isinstance(reason, str) or not (seconds is None or isinstance(seconds, int | float)):
        raise TypeError(f"{flag} returned {answer!r}; expected None, a reason, or (reason, seconds)")
    return Notice(reason, None if seconds is None else float(seconds))


@contextlib.contextmanager
def watching(config: PreemptionConfig | None, report: Callable[[Notice], None]) -> Iterator[None]:
    """While the block lasts, ask for a notice every few seconds, and call `report` with the first one."""
    ask = asking(config) if config else None
    if config is None or ask is None:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(ask, config, report, over), name="preemption", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def _watch(
    ask: Ask, config: PreemptionConfig, report: Callable[[Notice], None], over: threading.Event
) -> None:
    failed = False
    looked_at = time.monotonic()
    while not over.wait(config.interval):
        before, looked_at = looked_at, time.monotonic()
        try:
            notice = ask()
        except Exception as error:  # a service that does not answer must end no run
            if not failed:
                logger.warning("--preemption.watch %s does not answer: %s", config.watch, error)
            failed = True
            continue
        failed = False
        if notice is not None:
            report(Notice(notice.reason, _seconds_left(notice, config.seconds, time.monotonic() - before)))
            return


def _seconds_left(notice: Notice, allowed: float | None, age: float) -> float | None:
    """The seconds that are left after a notice: what it says, but no more than the settings allow.

    Args:
        age: of the notice, at most: the time since the look before. A look without an answer counts as well,
            else no time would be left after a service has failed for a while.
    """
    said = notice.seconds
    if said is not None and notice.at_begin:
        said = max(said - age, 0.0)
    known = [seconds for seconds in (said, allowed) if seconds is not None]
    return min(known, default=None)
