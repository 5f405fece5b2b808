"""What a model holds is compared with what came, where vLLM leaves the tensors' words as they are."""

import asyncio
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cairn.inference.plugin.loading import FIRST_UPDATES, SHARES, ParameterChecks
from cairn.inference.plugin.updates import StartWeights
from cairn.policy.checksums import checksum
from cairn.policy.errors import NotHeld


class Loaded:
    """A layer of three tensors: two are stacked, the third is computed with."""

    def __init__(self) -> None:
        self.held = ParameterChecks()
        start = self.tensors(0.0)
        assert list(self.held.watch(start.items(), torch.float32)) == list(start.items())
        self.held.note(self.parameters(start).items())

    def tensors(self, more: float) -> dict[str, torch.Tensor]:
        return {
            "q": torch.ones(4, 2) + more,
            "k": torch.full((2, 2), 3.0) + more,
            "log": torch.ones(2) + more,
        }

    def parameters(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.nn.Parameter]:
        stacked = torch.cat([tensors["q"], tensors["k"]])
        return {"qk": torch.nn.Parameter(stacked), "exp": torch.nn.Parameter(tensors["log"].exp())}

    def check(self, came: dict[str, torch.Tensor], held: dict[str, torch.Tensor], *names: str) -> None:
        parameters = self.parameters(held)
        part = {"qk": ("q", "k"), "exp": ("log",)}
        wires = [wire for name in names for wire in part[name]]
        self.held.check({w: checksum(came[w]) for w in wires}, {n: parameters[n] for n in names})


def test_one_value_that_is_one_bit_off_is_noticed():
    loaded = Loaded()
    new = loaded.tensors(0.25)
    loaded.check(new, new, "qk")
    old = {name: tensor.clone() for name, tensor in new.items()}
    old["k"].view(torch.int32)[1, 0] += 1
    with pytest.raises(NotHeld, match="qk"):
        loaded.check(new, old, "qk")
    with pytest.raises(NotHeld):
        loaded.check(new, loaded.tensors(0.0), "qk")


def test_what_loaders_compute_with_is_left_to_the_probe():
    loaded = Loaded()
    loaded.check(loaded.tensors(1.0), loaded.tensors(0.5), "exp")
    loaded.check(loaded.tensors(1.0), loaded.tensors(0.5), "qk", "exp")


def test_nothing_is_held_against_a_model_whose_start_was_not_seen():
    unseen = Loaded()
    unseen.held = ParameterChecks()
    unseen.check(unseen.tensors(1.0), unseen.tensors(0.5), "qk")


def test_every_layer_is_looked_at_in_the_first_updates_and_then_in_turn():
    held, seen = ParameterChecks(), []
    for update in range(FIRST_UPDATES + 2 * SHARES):
        held.begin_update()
        due = [layer for layer in range(2 * SHARES) if held.is_due(layer)]
        if update < FIRST_UPDATES:
            assert due == list(range(2 * SHARES))
        else:
            assert len(due) == 2
            seen += due
    assert sorted(seen) == sorted(2 * list(range(2 * SHARES)))


# What a server's start has loaded, and its first update of the same files. Servers are in
# tests/integration/test_inference.py, loaders in test_served_families.py.


class Engine:
    """Two workers, which give digests, if they do, of what they hold."""

    def __init__(self, model: Path, *held: dict[str, str]):
        self.model_config: Any = SimpleNamespace(model=str(model))
        self.held = list(held)

    async def compute_weight_checksums(self) -> list[dict[str, str]]:
        if not self.held:
            raise NotImplementedError("no digests of several engines")
        return [dict(worker) for worker in self.held]


def start_differs(engine: Any, *folders: Path) -> list[list[str] | None]:
    """What the updates from `folders` find, each of which changes the second worker."""

    async def updates() -> list[list[str] | None]:
        start, found = StartWeights(engine), []
        for folder in folders:
            await start.begin_update(str(folder))
            for worker in engine.held[1:]:
                worker["tp1:b"] = "other"
            found.append(await start.end_update())
        return found

    return asyncio.run(updates())


def test_only_the_first_update_is_compared_with_the_start_and_only_of_the_same_files(tmp_path: Path):
    model, copy = tmp_path / "model", tmp_path / "copy"
    model.mkdir()
    save_file({"a": torch.ones(2)}, model / "model.safetensors")
    shutil.copytree(model, copy)
    workers: Any = {"tp0:a": "1", "tp0:b": "2"}, {"tp1:a": "1", "tp1:b": "2"}
    assert start_differs(Engine(model, *map(dict, workers)), model, model) == [["tp1:b"], None]
    assert start_differs(Engine(model, *map(dict, workers)), copy, model) == [None, None]
    assert start_differs(Engine(Path("org/name"), *map(dict, workers)), Path("org/name")) == [None]


def test_an_engine_without_digests_takes_updates(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    log = logging.getLogger("vllm.cairn")  # which hands nothing on to the root's handlers
    log.addHandler(caplog.handler)
    try:
        assert start_differs(Engine(tmp_path), tmp_path) == [None]
    finally:
        log.removeHandler(caplog.handler)
    assert "what the start has loaded is not compared: NotImplementedError" in caplog.text
