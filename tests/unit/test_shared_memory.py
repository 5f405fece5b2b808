"""The division of one GPU's memory between trainer and server."""

from dataclasses import replace

import pytest
from runs import CONFIGS, REPOSITORY

from cairn.config.inference import InferenceConfig
from cairn.config.rl import RLConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.launch.memory import serving_needs, training_needs
from cairn.launch.needs import CONTEXT, GIB
from cairn.launch.plan.colocation import ASLEEP, FREE, LEAST_CACHE, MIB, SharedNeeds, divide, share_memory
from cairn.launch.plan.settings import settle
from cairn.run.errors import UsageError
from cairn.run.machine import machine_of


def needs(billions: float) -> SharedNeeds:
    """Of a model in bfloat16 with so many parameters."""
    of = int(billions * 1e9)
    return SharedNeeds(12 * of + GIB, 4 * of, 4 * GIB, 2 * of, 3 * GIB)


@pytest.mark.parametrize("has", [24 * GIB, 40 * GIB, 80 * GIB])
@pytest.mark.parametrize("billions", [0.1, 0.6, 1.0])
def test_all_that_is_awake_together_fits(has: int, billions: float):
    """And nothing is left over."""
    need = needs(billions)
    shares = divide(has, need)
    together = need.kept + need.weights + need.work + shares.cache
    assert 0 <= has - int(FREE * has) - together < MIB
    assert need.kept + need.gradients + need.activations + ASLEEP < has
    assert shares.warning is None
    assert shares.cache >= LEAST_CACHE


def test_vllm_starts_beside_what_the_trainer_keeps():
    """It refuses to if less of the GPU is free than the share that it is told, whatever the cache's size."""
    has, need = 24 * GIB, needs(0.6)
    shares = divide(has, need)
    assert shares.utilization * has <= has - need.kept - GIB, "less its own context"
    config = shares.given_to(InferenceConfig(vllm_args=["--gpu-memory-utilization", "0.2"]))
    assert config.kv_cache_memory == f"{shares.cache // MIB}M"
    assert config.vllm_args == [
        *("--gpu-memory-utilization", f"{shares.utilization:.2f}"),
        *("--gpu-memory-utilization", "0.2"),
    ], "of two, vLLM heeds the last"
    assert shares.given_to(InferenceConfig(kv_cache_memory="2G")).kv_cache_memory == "2G"


def test_what_does_not_fit_is_refused_with_the_numbers():
    """In turns, or when the server is awake."""
    with pytest.raises(
        UsageError,
        match=r"need 63\.3 GiB of one GPU, which has 24\.0 GiB: while a step is trained, .* 45\.7 GiB, its "
        r"gradients 14\.9 GiB, the sleeping server 2\.0 GiB",
    ):
        divide(24 * GIB, needs(4))
    float32 = replace(needs(1.3), weights=int(5.2e9))
    with pytest.raises(
        UsageError,
        match=r"which has 24\.0 GiB: between two steps, .* state 15\.5 GiB, the server's weights 4\.8 GiB, "
        r"its graphs and activations 3\.0 GiB, .* 0\.5 GiB at least, .* a server elsewhere",
    ):
        divide(24 * GIB, float32)
    divide(32 * GIB, float32)


def test_activations_that_may_not_fit_are_a_warning():
    """They are estimated."""
    shares = divide(24 * GIB, replace(needs(0.6), activations=30 * GIB))
    assert shares.warning is not None
    assert "30.0 GiB are for activations" in shares.warning


def test_the_server_gets_its_share_of_a_models_estimate():
    """What the two need of a GPU of their own is divided into what stays and what takes turns."""
    config, _ = settle(
        RLConfig(trainer=TrainerConfig(workers=1), inference=InferenceConfig(max_num_seqs=4)),
        machine_of("1x24G"),
        gpu_servers=True,
    )
    folder = str(REPOSITORY / CONFIGS / "model")
    rank = training_needs(folder, config.trainer, machine_of("1x24G")).rank
    server = serving_needs(folder, config.inference)
    need = SharedNeeds.of(rank, server)
    assert need.kept + need.gradients + need.activations == rank.total
    assert need.weights + need.work == server.total
    elements = server.counted // 2
    gathered = next(part.bytes for part in rank.parts if "gathered for a layer" in part.what)
    assert gathered > 0
    assert need.kept == CONTEXT + 12 * elements + gathered, "the probe's forward pass gathers weights"
    assert need.weights == 2 * elements
    assert need.gradients >= 4 * elements
    shared, shares = share_memory(config, folder, machine_of("1x24G"))
    assert shared.inference.kv_cache_memory == f"{shares.cache // MIB}M"
    assert 18 * GIB < shares.cache < 20 * GIB
    with pytest.raises(UsageError, match=r"one GPU, which has 4\.0 GiB"):
        share_memory(config, folder, machine_of("1x4G"))
