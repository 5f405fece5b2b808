"""A run as a job of Slurm's: writes its batch script into the run directory, and submits it.

The job reads no file of the user's: the settings that were given lie beside the script, so that editing a
file while the job waits in the queue changes nothing.
"""

import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlsplit

from cairn.config.branches import layers_of
from cairn.config.inference import InferenceConfig
from cairn.config.kinds import KINDS, RunConfig
from cairn.config.rl import DERIVED, RLConfig, ServersConfig, serving_all
from cairn.config.shared import PreemptionConfig, SlurmConfig
from cairn.run.errors import CairnError, UsageError
from cairn.run.files import make_folders, write_atomic
from cairn.run.object_store import is_loopback

FOLDER = "slurm"
"""Folder in the run directory for the job's script, settings and logs."""
SCRIPT = "job.sbatch"
BRANCHES = "branches"
"""Folder in there for the file of each branch."""
START_SECONDS = 600
"""Seconds that a job's nodes have at least to start Ray; `ray.start_timeout` may allow more."""


@dataclass(frozen=True)
class Job:
    """The files of a job, by name, to be written into `folder`."""

    folder: Path
    contents: dict[str, str]

    @property
    def script(self) -> Path:
        """Where the batch script lies."""
        return self.folder / SCRIPT


@dataclass(frozen=True)
class JobBranches:
    """What a job needs of a run's branches: the files of their settings, by name, and how they are served."""

    files: dict[str, str]
    servers: ServersConfig

    @classmethod
    def of(cls, config: RLConfig, each: Mapping[str, RLConfig], slurm: SlurmConfig) -> "JobBranches":
        """Of the settings that all have in common, and of each branch's.

        Raises:
            UsageError: branches that train at the same time would want the same GPUs.
        """
        at_once = min(config.branches.at_once, len(each))
        greedy = [name for name, one in each.items() if not one.trainer.workers]
        if at_once > 1 and slurm.nodes > 1 and greedy:
            raise UsageError(
                f"--branches.at-once {at_once}: in a job on {slurm.nodes} nodes each branch would take all "
                f"GPUs, and {greedy[0]} does not say how many: give --trainer.workers, so that all "
                "branches of a time fit"
            )
        layers = layers_of(config.branch).items()
        files = {f"{BRANCHES}/{name}.json": json.dumps(one.content, default=str) for name, one in layers}
        return cls(files, serving_all(each, at_once))


def job_of(command: str, config: RunConfig, slurm: SlurmConfig, branches: JobBranches | None = None) -> Job:
    """The job that runs `command` with these settings, and with all branches; nothing is written.

    Raises:
        UsageError: the settings do not fit a job.
    """
    kind, flags = KINDS[command], KINDS[command].flags("trainer")
    _refuse_another_start(config)
    folder = Path(config.output_dir) / FOLDER
    contents = dict(branches.files) if branches else {}
    settings = config.sharing(preemption=_told_in_time(config.preemption, slurm))
    if branches:
        settings = settings.model_copy(update={"branch": [str(folder / file) for file in branches.files]})
    words = [command, "@", str(folder / f"{command}.json"), "--ckpt.resume", "auto"]
    lines = [shlex.join(words)]
    if slurm.nodes > 1:
        trainer = kind.trainer(config)
        if trainer.ray.address:
            raise UsageError(
                f"{flags}ray.address {trainer.ray.address}: a job on {slurm.nodes} nodes starts a Ray "
                "cluster of its own; leave the address out"
            )
        if not trainer.workers and not slurm.gpus_per_node:
            raise UsageError(
                f"--slurm.nodes {slurm.nodes} needs --slurm.gpus-per-node, for one rank on each GPU, or "
                f"{flags}workers"
            )
        serving: list[str] = []
        if isinstance(config, RLConfig) and not _given_servers(config):
            serving = _serving(config, branches and branches.servers, slurm, folder, contents)
        lines = [
            f"start_seconds={max(START_SECONDS, math.ceil(trainer.ray.start_timeout))}",
            _shell("cluster.sh"),
            'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            *(serving or ["trainers=${#nodes[@]}"]),
            'start_ray "${nodes[@]:0:trainers}"',
            f'{lines[0]} {flags}ray.address "$address" '
            f"{flags}workers {trainer.workers or '$((trainers * GPUS))'}"
            + (' --orchestrator.inference-url "${urls[@]}"' if serving else ""),
        ]
        contents["node.sh"] = _shell("node.sh")
    lines[-1] = f"run {lines[-1]}"
    contents[f"{command}.json"] = _as_given(settings)
    contents[SCRIPT] = "\n".join([*_head(command, slurm, folder), _shell("job.sh"), *lines, ""])
    return Job(folder, contents)


def submit(job: Job) -> None:
    """Write the job's files and hand the script to sbatch.

    Raises:
        UsageError: this machine has no sbatch.
        CairnError: sbatch refuses the job.
    """
    for name, content in job.contents.items():
        make_folders((job.folder / name).parent)
        write_atomic(job.folder / name, content.encode())
    if shutil.which("sbatch") is None:
        raise UsageError(
            f"--slurm: there is no sbatch on this machine. The job is written: submit it on a login node of "
            f"the cluster, with `sbatch {shlex.quote(str(job.script))}`, if the run directory and this "
            "environment are at the same paths there; or run the command there"
        )
    done = subprocess.run(["sbatch", str(job.script)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip() or "it said nothing"
        raise CairnError(f"sbatch {job.script} ended with exit code {done.returncode}: {said}")
    print(f"{done.stdout.strip()}; its script and logs are in {job.folder}", flush=True)


def _refuse_another_start(config: RunConfig) -> None:
    """A requeued job would go back to a step that is named, and lose those since."""
    ckpt = config.ckpt
    if ckpt is None or ckpt.resume == "auto" or not ckpt.resumes:
        return
    named = f"resume {ckpt.resume}" if ckpt.resume else f"resume-step {ckpt.resume_step}"
    raise UsageError(
        f"--ckpt.{named}: a job resumes with --ckpt.resume auto, since a requeued one would go back to a "
        "step that is named. Leave it out to go on from the run's newest step; to begin with another step's "
        "weights in a new run directory, give its folder as --model.name"
    )


def _told_in_time(preemption: PreemptionConfig | None, slurm: SlurmConfig) -> PreemptionConfig:
    """The settings of notices, with the time that is left after the one that Slurm gives."""
    preemption = preemption or PreemptionConfig()
    if preemption.seconds is not None:
        return preemption
    return preemption.model_copy(update={"seconds": float(slurm.signal_seconds)})


def _as_given(settings: RunConfig | InferenceConfig) -> str:
    """The content of a file of settings from which a command reads these, its defaults left to be defaults.

    What is decided on the job's machine depends on which settings were given (`model_fields_set`).
    """
    return settings.model_dump_json(indent=2, exclude={"slurm", "servers"}, exclude_unset=True) + "\n"


def _given_servers(config: RLConfig) -> bool:
    """Whether the run's servers are elsewhere.

    Raises:
        UsageError: the address of one is of loopback.
    """
    urls = config.orchestrator.inference_url
    if here := [url for url in urls if is_loopback(urlsplit(url).hostname or "")]:
        raise UsageError(
            f"--orchestrator.inference-url {here[0]}: this address means the job's first node, where no "
            "server runs; leave it out, and the job's last nodes run servers (--slurm.server-nodes)"
        )
    return bool(urls)


def _server_nodes(config: RLConfig, slurm: SlurmConfig) -> int:
    """How many of the job's nodes run servers and nothing else; 0 if that is decided when it starts.

    Raises:
        UsageError: they leave too few for the trainer.
    """
    gpus, workers = slurm.gpus_per_node or 0, config.trainer.workers or 0
    training = max(1, -(-workers // gpus)) if gpus else 1  # nodes that the ranks need at least
    asked = config.slurm.server_nodes if config.slurm else None
    if slurm.nodes - (asked or 1) < training:
        left = "none" if asked and asked >= slurm.nodes else "too few"
        given = f"--slurm.server-nodes {asked} leaves" if asked else "the servers' one leaves"
        raise UsageError(
            f"--slurm.nodes {slurm.nodes}: {given} {left} for the trainer, which needs {training}; raise the "
            "nodes, or lower those of servers" + (" or --trainer.workers" if workers else "")
        )
    if asked or not gpus or slurm.nodes == 2:
        return asked or 1
    return slurm.nodes - training if workers else 0


def _serving(
    config: RLConfig,
    of_branches: ServersConfig | None,
    slurm: SlurmConfig,
    folder: Path,
    contents: dict[str, str],
) -> list[str]:
    """Shell lines that set `trainers`, and start servers on each node after those; adds the servers' files.

    Raises:
        UsageError: a node has too few GPUs for them, or there are too few nodes.
    """
    nodes = _server_nodes(config, slurm)
    served = of_branches or config.inference
    derived = served.model_dump(include=DERIVED, exclude_defaults=True)
    server = served.model_copy(update={**derived, "host": "0.0.0.0", "model": config.model})
    gpus, count, size = slurm.gpus_per_node or 0, server.servers, server.size
    if gpus and size * (count or 1) > gpus:
        several = f"--inference.servers {count} with " if count else ""
        raise UsageError(
            f"{several}--inference.tensor-parallel {server.tensor_parallel or 1}: the servers of a node need "
            f"{size * (count or 1)} GPUs, and --slurm.gpus-per-node is {gpus}; lower it"
        )
    settings = str(folder / "inference.json")
    contents["inference.json"] = _as_given(server)
    contents["server.sh"] = _shell("server.sh")
    by_memory = gpus > 1 and server.tensor_parallel is None and size == 1
    decide = ["python", "-m", "cairn.launch.slurm.servers_of_node", str(folder / "rl.json")]
    decide += [str(gpus), str(slurm.nodes), str(nodes)]
    command = shlex.join(["inference", "@", settings])
    return [
        f'decided="{size} {nodes}"'
        if nodes and not by_memory
        else f"decided=$($RUNNER {shlex.join(decide)})",
        'read -r size server_nodes <<< "$decided"',
        "trainers=$((${#nodes[@]} - server_nodes))",
        f"servers={count or ('$((GPUS / size))' if gpus else 1)} # on each node",
        "# Loading weights into a server takes this token, which servers and orchestrator have.",
        "CAIRN_INFERENCE_TOKEN=$(secret)",
        "export CAIRN_INFERENCE_TOKEN",
        "urls=()",
        'for node in "${nodes[@]:trainers}"; do',
        "    for ((server = 0; server < servers; server++)); do",
        f"        port=$(({server.port} + server))",
        '        on 1 "$node" bash "$folder/server.sh" "$server" "$size" '
        f'{command} --port "$port"' + (' --tensor-parallel "$size"' if by_memory else ""),
        '        urls+=("http://$node:$port")',
        "    done",
        "done",
    ]


def _head(command: str, slurm: SlurmConfig, folder: Path) -> list[str]:
    """What the job asks Slurm for, and its settings as shell variables."""
    asked = {
        "job-name": slurm.job_name or folder.parent.name,
        "nodes": slurm.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": slurm.gpus_per_node,
        "cpus-per-task": _cpus(slurm),
        "mem": slurm.mem,
        "time": slurm.time,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "signal": f"B:TERM@{slurm.signal_seconds}",
        "open-mode": "append",
        "output": str(folder).replace("%", "%%") + "/job_%j.log",
    }
    options = [f"--{name}={shlex.quote(str(value))}" for name, value in asked.items() if value is not None]
    options += ["--requeue" if slurm.requeue else "--no-requeue", *slurm.extra]
    settings = {
        "folder": str(folder),
        "requeue": "yes" if slurm.requeue else "no",
    }
    exported = {
        "RUNNER": slurm.runner or "",
        "GPUS": str(slurm.gpus_per_node or 0),
        "CPUS": str(_cpus(slurm) or ""),
        "INTERFACE": slurm.interface or "",
        "UV_NO_SYNC": "1",  # nodes that sync one environment at once would break it
    }
    own = [] if slurm.runner else [f'export PATH={shlex.quote(f"{sys.prefix}/bin")}:"$PATH"']
    return [
        "#!/usr/bin/env bash",
        f"# Written by {command} --slurm, which submits it with sbatch.",
        *(f"#SBATCH {option}" for option in options),
        "",
        "# shellcheck disable=SC2086,SC2329  # RUNNER is several words; a trap calls what nothing else does",
        "set -eo pipefail",
        ': "${SLURM_JOB_ID:?this is a batch script: submit it with sbatch}"',
        f"cd {shlex.quote(str(Path.cwd()))}",
        *slurm.setup,
        *own,
        *(f"{name}={shlex.quote(value)}" for name, value in settings.items()),
        *(f"export {name}={shlex.quote(value)}" for name, value in exported.items()),
        "",
    ]


CPUS_A_GPU = 8
"""Of nodes with 8 GPUs even small ones have 96. A rank launches kernels, prepares batches and writes."""
ASKS_FOR_CPUS = re.compile(r"--(exclusive|cpus-per-(task|gpu)|cores-per-socket)\b|-c\b")


def _cpus(slurm: SlurmConfig) -> int | None:
    """CPUs of each node: with none asked for, Slurm's default may be one for all of the node's GPUs."""
    if slurm.cpus_per_task or not slurm.gpus_per_node or any(map(ASKS_FOR_CPUS.match, slurm.extra)):
        return slurm.cpus_per_task
    return CPUS_A_GPU * slurm.gpus_per_node


def _shell(name: str) -> str:
    return files("cairn.launch.slurm").joinpath(name).read_text()
