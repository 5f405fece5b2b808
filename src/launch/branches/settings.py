"""The settings of each branch of `rl --branch`, as its own run has them, and those of the servers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cairn.checkpoint.store import CheckpointStore
from cairn.config.branches import BranchesConfig
from cairn.config.ckpt import CkptConfig
from cairn.config.inference import InferenceConfig
from cairn.config.kinds import KINDS
from cairn.config.model import ModelConfig
from cairn.config.rl import RLConfig, serving_all
from cairn.launch.plan.run_plan import RunPlan, make
from cairn.launch.plan.steps import STEPS
from cairn.run.branches import Branches, BranchStates
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.object_store import is_url

GOES_ON = ("auto", "latest")
UNMERGED = "unmerged"


def refuse(config: RLConfig, each: Mapping[str, RLConfig]) -> None:
    """Refuse what can't be done with branches, before anything is looked at.

    Raises:
        UsageError: the settings say so.
    """
    ckpt, rule = config.ckpt, config.branches
    if ckpt is None or not ckpt.training_state:
        raise UsageError(
            "--branch: branches take turns, and each goes on from its newest checkpoint: add --ckpt"
            + ("" if ckpt is None else ", and leave ckpt.training_state on")
        )
    if ckpt.resume_step is not None:
        raise UsageError(
            f"--ckpt.resume-step {ckpt.resume_step}: each branch has steps of its own; resume one of them by "
            "itself, with its settings and its folder, or all with --ckpt.resume auto"
        )
    if config.colocate:
        raise UsageError(
            "--colocate: servers that sleep while one branch trains are not warm; give GPUs to the servers "
            "(--inference.gpus), or a running server (--orchestrator.inference-url)"
        )
    if config.stop_after is not None:
        raise UsageError(f"--stop-after {config.stop_after}: the turns of the branches say where each stops")
    for one in rule.rules:
        if one.step > config.max_steps:
            raise UsageError(
                f"--branches.keep {one.step}:{one.count}: the branches end with step {config.max_steps} "
                "(--max-steps); give an earlier step"
            )
    if rule.rules and rule.rules[0].count >= len(each):
        first = rule.rules[0]
        raise UsageError(
            f"--branches.keep {first.step}:{first.count}: there are {len(each)} branches; keep fewer of them"
        )
    unmerged = [name for name, own in each.items() if _serves(own) == UNMERGED]
    if unmerged and len(unmerged) < len(each):
        other = next(name for name in each if name not in unmerged)
        raise UsageError(
            f'--branch: {unmerged[0]} has trainer.lora.serve = "unmerged", and {other} has not: a server '
            "takes adapters alone, or weights alone, and all branches ask the same ones"
        )
    if rule.at_once > 1 and not unmerged:
        raise UsageError(
            f"--branches.at-once {rule.at_once}: a server holds the weights of one policy, so branches that "
            "train whole weights, or adapters that are merged, take turns; leave it out, or give "
            'trainer.lora.serve "unmerged"'
        )


def _serves(config: RLConfig) -> str | None:
    return config.trainer.lora and config.trainer.lora.serve


@dataclass(frozen=True)
class SharedByBranches:
    """What all branches have in common.

    servers: the settings of those that the command starts, by name; none if it is given addresses. urls:
    where the servers are. model: what the branches start from, if the command has resolved it.
    """

    servers: Mapping[str, InferenceConfig]
    urls: list[str]
    model: str | None


def shared_by(
    config: RLConfig, each: Mapping[str, RLConfig], start: str | None, at_once: int
) -> SharedByBranches:
    """What the branches share: servers that are given, or those that a run of its own would start.

    Raises:
        CairnError: no such run can start.
    """
    if urls := config.orchestrator.inference_url:
        return SharedByBranches({}, urls, None)
    first = next(iter(each.values()))
    assert config.ckpt is not None, "it was refused"
    ckpt = config.ckpt.model_copy(update={"resume": start})
    alone = first.sharing(output_dir=config.output_dir, ckpt=ckpt, stop_after=None)
    inference = serving_all(each, at_once)
    alone = alone.model_copy(update={"inference": inference, "branch": [], "branches": BranchesConfig()})
    plan = make("rl", alone, STEPS)
    servers = KINDS["rl"].servers(plan.config)
    if any(one.colocated for one in servers.values()):
        raise UsageError(
            "--branch: this machine has one GPU, which server and trainer would share by turns, and then no "
            "server is warm: give a running server elsewhere (--orchestrator.inference-url)"
        )
    model = plan.model if plan.first.folder is None else None
    return SharedByBranches(servers, plan.config.orchestrator.inference_url, model)


def of_branch(
    name: str, own: RLConfig, branches: Branches, shared: SharedByBranches, states: BranchStates
) -> RLConfig:
    """The settings by which a branch goes on, in a folder of its own, also without the others.

    Args:
        own: as the command line and the branch's file give them.
    """
    assert own.ckpt is not None, "it was refused"
    siblings = [one for one in states.names if one != name and own.branches.share_answers]
    orchestrator = own.orchestrator.model_copy(
        update={
            "siblings": {one: str(branches.run(one)) for one in siblings},
            "branched_at": states.since,
        }
    )
    config = own.model_copy(update={"orchestrator": orchestrator, "branch": [], "branches": BranchesConfig()})
    model = own.model if shared.model is None else ModelConfig(name=shared.model)
    ckpt = _in_folder(own.ckpt, name).model_copy(update={"resume": "auto"})
    config = config.sharing(output_dir=str(branches.run(name)), ckpt=ckpt, stop_after=None, model=model)
    if states.start is None or store_of(name, own, branches).steps():
        return config
    return config.sharing(ckpt=ckpt.model_copy(update={"resume": states.start}))


def store_of(name: str, own: RLConfig, branches: Branches) -> CheckpointStore:
    """The checkpoints of a branch, by its settings as the command line and its file give them."""
    assert own.ckpt is not None, "it was refused"
    return CheckpointStore(RunDirectory(branches.run(name), _in_folder(own.ckpt, name).dir).checkpoints)


def at_servers(config: RLConfig, urls: Sequence[str]) -> RLConfig:
    """A branch's settings with the servers of all: without what plans for GPUs would look at."""
    orchestrator = config.orchestrator.model_copy(update={"inference_url": list(urls)})
    inference = config.inference.model_copy(update={"gpus": None, "servers": None})
    return config.model_copy(update={"orchestrator": orchestrator, "inference": inference, "colocate": None})


def _in_folder(ckpt: CkptConfig, name: str) -> CkptConfig:
    """With the branch's name below each place that checkpoints go to beside the run directory."""
    changed: dict[str, object] = {}
    for key in ("dir", "remote"):
        if (place := getattr(ckpt, key)) is not None:
            changed[key] = f"{place.rstrip('/')}/{name}" if is_url(place) else str(Path(place) / name)
    if ckpt.export is not None and ckpt.export.folder is not None:
        folder = str(Path(ckpt.export.folder) / name)
        changed["export"] = ckpt.export.model_copy(update={"folder": folder})
    return ckpt.model_copy(update=changed)


def planned(config: RLConfig) -> RunPlan:
    """The plan of a branch's dry run, which touches nothing."""
    return make("rl", config.model_copy(update={"dry_run": True}), STEPS)


def check(name: str, config: RLConfig) -> RunPlan:
    """Look whether a branch could start; returns the plan of its dry run.

    Raises:
        UsageError: it could not.
    """
    plan = planned(config)
    if plan.errors:
        raise UsageError(f"branch {name}: {plan.errors[0]}")
    return plan


def refuse_shared_gpus(plans: Mapping[str, RunPlan]) -> None:
    """Refuse branches that train at the same time on the same GPUs.

    Raises:
        UsageError: two of them do.
    """
    taken: dict[str, str] = {}
    for name, plan in plans.items():
        for gpu in plan.ranks.gpus:
            if (other := taken.setdefault(gpu.uuid, name)) != name:
                raise UsageError(
                    f"--branches.at-once: {other} and {name} would train on GPU {gpu.uuid} at the same time: "
                    "give each branch trainer.gpus of its own, or leave --branches.at-once out"
                )
