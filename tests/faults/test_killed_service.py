"""The service is killed at each of its fault points, and in a commit, and its client notices nothing."""

from pathlib import Path
from typing import Any

import pytest
from light_client import LightClient
from runs import CONFIGS, Command, Shell, assert_same_bits
from safetensors.torch import load_file

from cairn.checkpoint.step_folder import verify
from cairn.run.connections import free_port

pytestmark = pytest.mark.timeout(600)

FAULTS = (
    *(
        "service.received:kill@6",
        "service.executed:kill@8",
        "service.answered:kill@5",
        "service.saved:kill@1",
    ),
    *("commit.before_manifest:kill@2", "commit.manifest_written:kill@3", "commit.done:kill@2"),
)


def test_a_service_that_is_killed_at_each_point_goes_on_to_the_bit(shell: Shell, tmp_path: Path):
    """What a client gets, and what is saved, is as where nothing was killed; each call counts once."""
    port, out, once = free_port(), tmp_path / "out", tmp_path / "once"
    once.mkdir()
    for fault in FAULTS:
        (once / fault).touch()
    faulty = {"CAIRN_FAULT": ",".join(FAULTS), "CAIRN_FAULT_ONCE": str(once)}
    arguments = ("cairn", "service", "@", f"{CONFIGS}/service.toml", "--port", port, "--output-dir", out)
    arguments = (*arguments, "--sampling", "off", "--state-interval", 2)
    arguments = (*arguments, "--workers", 2, "--micro-batch-tokens", 16)
    found: list[list[Any]] = []
    with Revived(shell, arguments, faulty) as service:
        key = service.command.wait_until(lambda: read_key(out / "key"))
        for _ in range(2):  # the second one after the last fault
            client = LightClient(f"http://127.0.0.1:{port}", key)
            client.wait = service.revive
            model = client.create(seed=4)
            answers = client.train(model, range(4))
            answers += [client.result(client.call("save_weights", model, path="end"))]
            answers[-1] = {**answers[-1], "path": answers[-1]["path"].partition("/weights/")[2]}
            other = client.from_state(f"tinker://{model}/weights/end")
            answers += client.train(other, range(4, 6))
            found.append(answers)
            steps = out / "models" / model.replace(":", "_")
            verify(steps / "step_14")
            found[-1].append(load_file(steps / "step_14" / "model" / "adapter_model.safetensors"))
        assert service.starts == 1 + len(FAULTS)
    assert not list(once.iterdir())
    assert found[0][:-1] == found[1][:-1]
    assert_same_bits(found[0][-1], found[1][-1])
    assert [one["metrics"]["step:max"] for one in found[0][2:12:3]] == [1, 2, 3, 4]


def read_key(path: Path) -> str:
    """The key in a file, or nothing as long as it is not there."""
    return path.read_text().strip() if path.exists() else ""


class Revived:
    """A command that is started again whenever it was killed, and ends with the context."""

    def __init__(self, shell: Shell, arguments: tuple[Any, ...], environment: dict[str, str]):
        self._shell, self._arguments, self._environment = shell, arguments, environment
        self.starts = 0
        self.command: Command

    def __enter__(self) -> "Revived":
        self._start()
        return self

    def _start(self) -> None:
        self.starts += 1
        assert self.starts < 20
        self.command = self._shell.start(*self._arguments, environment=self._environment)
        self.command.__enter__()

    def revive(self) -> None:
        """Start it, if it is dead."""
        if self.command.process.poll() is not None:
            assert self.command.process.returncode == -9, self.command.output
            self.command.__exit__(None, None, None)
            self._start()

    def __exit__(self, *_: object) -> None:
        self.command.process.terminate()
        try:
            assert self.command.finish().code == 0, self.command.output
        finally:
            self.command.__exit__(None, None, None)
