"""The servers at addresses that a user has given: whether they answer, and take what the trainer publishes.

They are asked before anything is started or written.
"""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.config.orchestrator import OrchestratorConfig
from cairn.config.rl import RLConfig
from cairn.inference.vllm_command import differing_files
from cairn.launch.plan.environments import facts_of
from cairn.launch.plan.settings import settle
from cairn.policy.errors import ServerUnavailable
from cairn.run.errors import CairnError, UsageError
from cairn.run.exits import WORKING
from cairn.run.machine import Machine
from cairn.run.waiting import run_async

if TYPE_CHECKING:
    from cairn.inference.client import ServerStatus  # which imports httpx
    from cairn.launch.plan.run_plan import Draft

ANSWER_SECONDS = 30.0
"""Seconds that a server has to answer a status request before a run starts."""


def with_servers(config: RLConfig, roles: list[str]) -> tuple[RLConfig, list[str]]:
    """The configuration with the servers' addresses and the trainer's towards them, and the roles to start.

    Raises:
        ServerUnavailable: no server answers at a given address.
        UsageError: it does not take what the trainer publishes.
    """
    urls = config.orchestrator.inference_url
    if not urls:
        own = [server.url for server in config.inference.each.values()]
        orchestrator = config.orchestrator.model_copy(update={"inference_url": own})
        return config.model_copy(update={"orchestrator": orchestrator}), roles
    for url in urls:
        if problem := _problem_with(_status(url, _patience(config)), config):
            raise UsageError(f"--orchestrator.inference-url {url}: {problem}")
    return config.towards_servers(), [role for role in roles if role in WORKING]


def check_bases(config: RLConfig, model: str) -> None:
    """Check that servers which compute adapters beside their model hold the model that these are of.

    Args:
        model: the folder of the run's base.

    Raises:
        ServerUnavailable: no server answers at a given address.
        UsageError: it holds another model.
    """
    lora = config.trainer.lora
    if lora is None or lora.serve != "unmerged":
        return
    for url in config.orchestrator.inference_url:
        status = _status(url, _patience(config))
        if other := differing_files(Path(model), status.base):
            raise UsageError(
                f"--orchestrator.inference-url {url}: it was started with {status.model}, and the run's base "
                f'model is {model}: they differ in {other[0]}. With lora.serve = "unmerged" a server '
                "computes adapters beside the model that it was started with; start it with the base: "
                f"inference --model.name {model}"
            )


def context_of(config: OrchestratorConfig) -> int | None:
    """Maximum tokens of a prompt and its answer on the servers at given addresses that answer now; None if
    none of them tells."""
    found: list[int] = []
    for url in config.inference_url:
        with contextlib.suppress(CairnError):
            length = _status(url, 0.0).max_model_len
            found += [] if length is None else [length]
    return min(found, default=None)


def facts_of_run(draft: "Draft", *, records_are_checked: bool) -> dict[str, Any]:
    """What `preflight` has to know of the run that a command starts.

    Args:
        records_are_checked: whether the run's recipe was made, for which all records are looked at.
    """
    facts: dict[str, Any] = {"records_are_checked": records_are_checked}
    if draft.checked is not None:
        own, config = draft.own_server, draft.config
        context = config.inference.max_model_len if own else context_of(config.orchestrator)
        facts |= facts_of(draft.checked, context, own_server=own)
    return facts


def gpus_of_servers(config: RLConfig, machine: Machine) -> dict[str, str]:
    """The GPUs, by UUID, that the servers at given addresses use, each with its server's address.

    Raises:
        ServerUnavailable: no server answers at a given address.
    """
    patience = _patience(settle(config, machine, gpu_servers=True)[0])
    urls = config.orchestrator.inference_url
    return {gpu: url for url in urls for gpu in _status(url, patience).gpus or ()}


def _problem_with(status: "ServerStatus", config: RLConfig) -> str | None:
    """Why a server does not take what the trainer publishes, or tell what it needs; None if it does."""
    if config.trainer.router_replay and (lacks := status.lacks_for_replay):
        return lacks
    rank, lora = status.max_lora_rank, config.trainer.lora
    if lora is None or lora.serve != "unmerged":
        if rank is None:
            return None
        return (
            "it was started with --max-lora-rank, and takes nothing but adapters: start it without, or give "
            '--trainer.lora.serve "unmerged"'
        )
    if rank is None or rank < lora.rank:
        takes = "merges adapters" if rank is None else f"computes adapters up to rank {rank}"
        return f'it {takes}, and lora.serve = "unmerged" needs --max-lora-rank {lora.rank} there'
    if status.max_loras is not None and status.max_loras < config.versions_in_flight:
        return (
            f"it answers from {status.max_loras} policies at once, and answers of "
            f"{config.versions_in_flight} may be in progress with max_off_policy_steps = "
            f"{config.orchestrator.max_off_policy_steps}: start it with --max-loras "
            f"{config.versions_in_flight}"
        )
    return None


def _patience(config: RLConfig) -> float:
    """Seconds that a given server may take to answer: when a run resumes, it may still be starting."""
    resumes = config.ckpt is not None and config.ckpt.resumes
    return (config.orchestrator.server_timeout or 0.0) if resumes else 0.0


def _status(url: str, patience: float) -> "ServerStatus":
    """What the server says of itself; when a run resumes, it may still be starting.

    Raises:
        ServerUnavailable: it did not answer within `patience` seconds.
    """
    return run_async(_ask(url, patience))


async def _ask(url: str, patience: float) -> "ServerStatus":
    from cairn.inference.client import InferenceClient  # most runs have a server of their own, or none

    end = time.monotonic() + patience
    waiting = False
    async with InferenceClient(url, timeout=ANSWER_SECONDS, retry_for=0) as client:
        while True:
            try:
                return await client.status()
            except ServerUnavailable as error:
                # Patience allows for a second look, however long the first one took.
                if time.monotonic() > end and (waiting or not patience):
                    raise
                if not waiting:
                    print(
                        f"waiting for the inference server, at most {patience:g} s "
                        f"(--orchestrator.server-timeout): {error}",
                        flush=True,
                    )
                waiting = True
            await asyncio.sleep(0.5)
