"""Every wait that ends with an error after some seconds names the setting that allows more."""

import ast
import re
from pathlib import Path

import pytest

import cairn
from cairn.config.cli import COMMANDS
from cairn.config.settings import settings_of
from cairn.run.extensions import syntax_tree
from cairn.run.waiting import Backoff

SOURCES = Path(cairn.__file__).parent
WAITED = re.compile(r"\b(?:waited|within|after|for|than) \{\} s\b")
"""How a message says that time ran out."""
WITHOUT = {
    "watch/sinks/notify.py: {} has not answered within {} s": "the notice is sent again",
    "watch/sinks/notify.py: {} has not ended within {} s": "the notice is sent again",
    "watch/sinks/main.py: it has not returned for {} s": "a sink's own time, which nothing waits for",
    "watch/page/events.py:  after {} s in which nobody was at work": "how long a run was left alone",
    "inference/client.py: not healthy after {} s": "whoever waits has given the deadline",
    "inference/pool/membership.py: {} hangs: no sign of life for {} s": "another server answers its requests",
    "inference/pool/membership.py: {} has not answered for {} s": "it is asked again until server_timeout",
    "remote/client/s3.py: {}: {} bytes took longer than {} s": "the caller tries again",
    "tools/chaos/plan.py:  for {} s": "a fault that lasts so long",
    "run/processes.py: ; the same again, after {} s, stops at once": "how to stop a run",
    "launch/display.py: {} for {} s": "what a run waits for at the moment, with its own deadline",
    "orchestrator/loop.py: {} for {} s": "the oldest call of user code, in a sign of life",
    "run/diagnosis/rules.py: servers and trainer wait for rewards": "what a step's time goes to",
    "launch/plan/external_servers.py: waiting for the inference server, at most {} s": "a line before it",
    "run/file_system.py: warning: in RL each answer is a transaction": "what a disk costs",
    "launch/ray/cluster.py: {}: waiting for nodes, for up to {} s (ray.start_timeout)": "a line before it",
}
"""Messages that need not name a setting, and why."""
OF_ARGUMENTS = {"wait", "start_timeout", "message_timeout", "connect_timeout"}
"""Settings of an environment, which are keys of `environment.args`."""


def messages() -> dict[str, str]:
    """Every formatted text of the sources, with {} for values, by file and text."""
    found = {}
    for file in SOURCES.rglob("*.py"):
        for node in ast.walk(syntax_tree(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
                found[f"{file.relative_to(SOURCES)}: {text}"] = text
    return found


def flags() -> set[str]:
    """Every setting of every command, with underscores."""
    return {".".join(leaf.path) for config in COMMANDS.values() for leaf in settings_of(config).leaves()}


@pytest.mark.slow
def test_a_message_that_time_ran_out_names_a_setting():
    found = messages()
    nameless = {key for key, text in found.items() if WAITED.search(text) and "allows more" not in text}
    assert {key for key in nameless if not any(key.startswith(known) for known in WITHOUT)} == set()
    assert [known for known in WITHOUT if not any(key.startswith(known) for key in found)] == []


@pytest.mark.slow
def test_the_settings_that_messages_name_exist():
    known = flags()
    named = {
        word
        for text in messages().values()
        for word in re.findall(r"([\w.-]+) allows more", text.replace("--", ""))
    }
    assert named, "there are such messages"
    missing = {word for word in named if word.replace("-", "_") not in known | OF_ARGUMENTS}
    assert missing == {"orchestrator.environment.args.time_limit"}


@pytest.mark.parametrize("file", [file for file in SOURCES.rglob("*.py") if "wait_for(" in file.read_text()])
def test_waits_are_given_a_setting_that_exists(file: Path):
    for node in ast.walk(syntax_tree(file.read_text())):
        for keyword in node.keywords if isinstance(node, ast.Call) else []:
            if keyword.arg == "setting" and isinstance(keyword.value, ast.Constant):
                assert keyword.value.value.removeprefix("--").replace("-", "_") in flags()


def test_pauses_between_tries_double_up_to_the_longest():
    backoff = Backoff(0.5, 3.0)
    pauses = [backoff.seconds]
    for _ in range(4):
        backoff.grow()
        pauses.append(backoff.seconds)
        assert backoff.seconds / 2 <= backoff.spread() <= backoff.seconds
    assert pauses == [0.0, 0.5, 1.0, 2.0, 3.0]
    assert [Backoff(0.5, 3.0, failed=tries).seconds for tries in range(5)] == pauses
    backoff.reset()
    assert (backoff.seconds, backoff.spread()) == (0.0, 0.0)
