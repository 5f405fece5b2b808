"""The commands to disturb, with their settings, server and proxy."""

import functools
import itertools
import json
import secrets
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cairn.config.branches import BranchesConfig
from cairn.inference.client import Unauthorized, token_for
from cairn.run.connections import free_port
from cairn.run.errors import UsageError
from cairn.tools.chaos.disasters import mount_small_disk, unmount
from cairn.tools.chaos.plan import ChaosSettings
from cairn.tools.chaos.proxy import Proxy
from cairn.tools.chaos.run import scratch
from cairn.tools.chaos.task import ChaosTask, SharedServer

CONFIGS = "configs/reverse_text"
SHORT = ["--max-steps", "10", "--ckpt.interval", "3", "--ckpt.keep-last", "2"]
SFT = ["sft", "@", f"{CONFIGS}/sft.toml", *SHORT, "--data.batch-size", "192"]
RL = ["rl", "--trainer", f"@{CONFIGS}/train.toml", "--orchestrator", f"@{CONFIGS}/orch.toml", *SHORT]
RL_ALONE = ["rl", "@", f"{CONFIGS}/rl.toml", *SHORT]
NETWORK = ["--trainer.weight-transport", "network"]
KEEPING = ["--trainer.keep-batches-gb", "1"]
REMOTE = ["--ckpt.remote-keep-last", "2"]
PAIR = [*SFT, "--workers", "2"]
HELD_OUT = ["--data.held-out", "0.02", "--validation", '[{"name": "held", "interval": 2}]']
LORA = ["--lora.rank", "8", *HELD_OUT]
PAIRS = [*SHORT, "--data.batch-size", "96"]
RANDOM = ["--model.name", f"{CONFIGS}/model", "--model.init-seed", "0"]
DPO = ["dpo", "@", f"{CONFIGS}/dpo.toml", *RANDOM, *PAIRS]
REWARD = ["reward", "@", f"{CONFIGS}/reward.toml", *PAIRS]
CRITIC = [
    *("--orchestrator.advantage.type", "gae", "--trainer.critic.warmup-steps", "2"),
    *("--trainer.critic.optimizer.lr", "1e-3", "--trainer.updates-per-batch", "2"),
    *("--trainer.kl.reference", "start", "--trainer.kl.coef", "0.01"),
]
ADAPTER = ["--trainer.lora.rank", "8", "--trainer.lora.serve", "adapter"]
COMMANDS = ("sft", "rl", "dpo", "reward")
"""Those that can be disturbed."""
WITH_REFERENCE = ("dpo", "ipo")
"""Losses of `dpo` whose reference scores all records before the first step."""
ALONE = {"sft": SFT, "pair": PAIR, "lora": [*SFT, *LORA], "dpo": DPO, "reward": REWARD}
"""Commands of runs without a server."""
SHARING = {"network": NETWORK, "critic": CRITIC, "adapter": ADAPTER}
"""What is added to the command of `rl`, whose server and proxy are used."""
TURNS = (
    *("sft", "rl", "network", "pair", "rl", "alone", "sft_remote", "rl_remote"),
    *("critic", "lora", "adapter", "dpo", "critic", "reward"),
)
"""Kinds of runs that alternate if no command is given.

pair: two ranks; alone: starts its own server; remote: uploads its steps, so that its machine may be lost;
critic: with two updates for each batch and a penalty on KL; lora: of SFT, with validation; adapter: of RL,
sent to the servers as such.
"""


@dataclass
class Bench:
    """What one parallel job works with: its own server and proxy, so that jobs don't interfere."""

    folder: Path
    command: list[str]
    tasks: dict[str, ChaosTask]
    proves: bool = False
    """Whether steps are taken again, for which RL has to keep its batches."""

    def task(self, run: int) -> ChaosTask:
        """The task of run number `run`."""
        return self._task("given" if self.command else TURNS[run % len(TURNS)])

    def _task(self, kind: str) -> ChaosTask:
        if kind not in self.tasks:
            task = self._make(kind)
            keeping = KEEPING if self.proves and task.command[0] == "rl" else []
            self.tasks[kind] = replace(task, command=[*task.command, *keeping])
        return self.tasks[kind]

    def _make(self, kind: str) -> ChaosTask:
        if kind in ALONE:
            return make_task(ALONE[kind])
        if kind == "alone":
            return make_task([*RL_ALONE, "--inference.port", str(free_port())])
        if kind == "given":
            return make_task(self.command)
        if kind == "sft_remote":
            return with_remote(self._task("sft"))
        if kind == "rl_remote":
            return with_remote(self._task("rl"))
        if kind in SHARING:
            usual = self._task("rl")
            return replace(usual, command=[*usual.command, *SHARING[kind]], calm=None)
        token, url = secrets.token_urlsafe(16), f"http://127.0.0.1:{free_port()}"
        command = ["inference", "@", f"{CONFIGS}/infer.toml", "--port", url.rpartition(":")[2]]
        server = SharedServer(self.folder, command, url, token)
        return make_task([*RL, "--orchestrator.inference-url", url], server, token)

    def close(self) -> None:
        """Stop the server."""
        sharing = {*SHARING, "rl_remote"}
        for task in [task for kind, task in self.tasks.items() if kind not in sharing]:
            if task.server:
                task.server.kill()
            if task.proxy:
                task.proxy.close()


def with_remote(task: ChaosTask) -> ChaosTask:
    """The same task with remote steps."""
    return replace(task, command=[*task.command, *REMOTE], setting=replace(task.setting, remote=True))


def make_task(command: list[str], server: SharedServer | None = None, token: str = "") -> ChaosTask:
    """A task from a command line; a dry run of the command gives the configuration.

    Raises:
        UsageError: the command can't be disturbed.
    """
    config = dry_run(command)
    branches: dict[str, dict[str, Any]] = config.get("branch") or {}  # with --branch: the settings of each
    config = next(iter(branches.values()), config)
    interval = (config.get("ckpt") or {}).get("interval")
    if not interval or interval >= config["max_steps"]:
        raise UsageError("the command needs --ckpt.interval N, less than --max-steps, to resume from")
    resumes = any(word.startswith("--ckpt.resume") for word in command)
    if resumes or (not branches and (config["ckpt"].get("resume") or config["ckpt"].get("resume_step"))):
        raise UsageError("the command must not have --ckpt.resume: the harness adds it after a disaster")
    if config["ckpt"].get("dir") or not config["ckpt"].get("training_state", True):
        raise UsageError("the command must save all state, in its own folder: no --ckpt.dir, no weights only")
    rl = command[0] == "rl"
    remote: str | None = config["ckpt"].get("remote")
    ranks = (config["trainer"] if rl else config)["workers"] or 1
    setting = ChaosSettings(config["max_steps"], interval, rl, ranks=ranks, own_disk=may_mount())
    reference = command[0] == "dpo" and config["loss"]["type"] in WITH_REFERENCE
    setting = replace(
        setting,
        remote=remote is not None,
        validated=bool(config.get("validation")),
        reference=reference,
        in_memory=config["ckpt"].get("memory_interval"),
    )
    if branches:
        if remote is not None:
            raise UsageError("a command with --branch must keep its steps in its folder: no --ckpt.remote")
        setting = with_branches(setting, config["branches"], len(branches))
    task = ChaosTask(command, setting, token, server=server, remote=remote, branches=tuple(branches))
    if not rl:
        return task
    orchestrator = config["orchestrator"]
    if any(one["orchestrator"].get("max_off_policy_steps") for one in (config, *branches.values())):
        raise UsageError("the command needs --orchestrator.max-off-policy-steps 0 to be reproducible")
    urls = orchestrator["inference_url"]
    if len(urls) > 1:
        raise UsageError("the command may have one inference server at most")
    groups = orchestrator["prompts_per_step"]
    task.setting = replace(task.setting, groups=groups, server=None if urls else "inference")
    if urls:
        task.proxy = Proxy(urls[0])
        task.setting = replace(task.setting, proxied=True, server="server" if server else None)
        try:
            task.token = token or token_for(urls[0])
        except Unauthorized as error:
            raise UsageError(str(error)) from None
    return task


def with_branches(setting: ChaosSettings, rule: dict[str, Any], count: int) -> ChaosSettings:
    """The settings of a run with branches, whose steps are those of all of them together.

    Args:
        rule: `branches` of the command's settings.
        count: of branches.
    """
    rules = BranchesConfig(**rule).rules
    ends = itertools.pairwise([0, *(one.step for one in rules), setting.last_step])
    counts = [count, *(one.count for one in rules)]
    steps = sum(going * (end - begin) for going, (begin, end) in zip(counts, ends, strict=True))
    turn = min(rule["turn_steps"], setting.last_step)
    return replace(setting, last_step=steps, own_disk=False, turn_steps=turn, records=1 + len(rules))


def dry_run(command: list[str]) -> dict[str, Any]:
    """The configuration of the command.

    Raises:
        UsageError: the command fails.
    """
    executable = Path(sys.executable).parent / command[0]
    if command[0] not in COMMANDS or not executable.exists():
        raise UsageError(f"{command[0]}: the command must be {', '.join(COMMANDS)}, with its flags")
    done = subprocess.run([str(executable), *command[1:], "--dry-run"], capture_output=True, text=True)
    if done.returncode:
        raise UsageError(f"{shlex.join(command)}: {done.stderr.strip()}")
    return json.loads(done.stdout)


@functools.cache
def may_mount() -> bool:
    """Whether this process may mount small file systems, to fill them."""
    folder = scratch("chaos_disk_")
    try:
        return mount_small_disk(folder)
    finally:
        unmount(folder)
        folder.rmdir()
