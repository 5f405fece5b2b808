"""The steps of a plan that look at where its command runs: machine, GPUs, Ray cluster and file systems.

Beside each stands what a dry run does instead, which may be about another machine.
"""

from cairn.inference.vllm_command import installed_build, serves_on_gpus
from cairn.launch.plan import external_servers
from cairn.launch.plan.gpu_assignment import check_torch, torch_without_cuda
from cairn.launch.plan.run_plan import Draft
from cairn.launch.plan.settings import settle
from cairn.launch.ray.gpus import cluster_of
from cairn.run.errors import UsageError
from cairn.run.file_system import BUCKETS, file_system_of, remarks
from cairn.run.machine import Machine, lack_of_cpus, machine_of, this_machine


def machine(draft: Draft) -> Draft:
    """This machine, and the builds of vLLM on it."""
    vllm = installed_build() if draft.own_server else "gpu"
    return draft.having(machine=this_machine(), vllm=vllm, gpu_servers=serves_on_gpus())


def machine_planned(draft: Draft) -> Draft:
    """That of --machine, or this one."""
    if draft.given.machine:
        machine = machine_of(draft.given.machine)
        return draft.having(
            machine=machine, vllm="gpu" if machine.has_gpus else "cpu", gpu_servers=machine.has_gpus
        )
    on_gpus = serves_on_gpus()
    draft = draft.having(machine=this_machine(), vllm="gpu" if on_gpus else "cpu", gpu_servers=on_gpus)
    return draft.having(errors=(*draft.errors, *_build_problem())) if draft.own_server else draft


def machine_in_words(machine: Machine) -> str:
    """A machine for people: its GPUs and its memory."""
    kinds = [f"{gpu.memory / 2**30:.0f} GiB ({gpu.name})" for gpu in machine.gpus]
    gpus = ", ".join(
        f"{kinds.count(kind)} GPU{'s' * (kinds.count(kind) > 1)} with {kind}" for kind in dict.fromkeys(kinds)
    )
    return f"{gpus or 'no GPU'}, {machine.memory / 2**30:.0f} GiB of memory"


def _build_problem() -> list[str]:
    try:
        installed_build()
    except UsageError as error:
        return [str(error)]
    return []


def gpus_of_servers(draft: Draft) -> Draft:
    """The GPUs of this machine that given servers say they use."""
    return draft.having(taken=external_servers.gpus_of_servers(draft.config, draft.machine))


def torch(draft: Draft) -> Draft:
    """See that the installed build of torch computes where the ranks are."""
    assert draft.placing is not None
    check_torch(draft.placing, torch_without_cuda())
    return draft


def cluster(draft: Draft) -> Draft:
    """What a given Ray cluster has; without GPUs its ranks compute on CPUs."""
    trainer, config = draft.trainer, draft.config
    cluster = cluster_of(trainer)
    if not cluster.has_gpus and trainer.gpus is None:
        print(
            f"the Ray cluster at {trainer.ray.address} has no GPU: the ranks compute on its CPUs", flush=True
        )
        # A node with GPUs that joins later would compute with settings that are settled for CPUs.
        on_cpus = trainer.model_copy(update={"gpus": "0", "workers": trainer.ranks})
        config = draft.kind.with_trainer(config, on_cpus)
    return draft.having(config=config, cluster=cluster)


def cluster_seen(draft: Draft) -> Draft:
    """What the cluster has at the moment, whether or not there is room for the ranks."""
    assert draft.placing is not None
    if not draft.placing.in_cluster or draft.given.machine:
        return draft
    return draft.having(cluster=cluster_of(draft.trainer, waits=False))


def device_defaults(draft: Draft) -> Draft:
    """With the settings that this hardware decides."""
    settled, choices = settle(draft.config, draft.ranks, gpu_servers=draft.gpu_servers)
    return draft.having(config=settled, settled=settled, choices=(*draft.choices, *choices))


def words(draft: Draft) -> Draft:
    """Say which role computes where, and what there is too little of."""
    assert draft.placing is not None
    if words := draft.placing.in_words():
        print(words, flush=True)
    if draft.machine.has_gpus and draft.own_server and draft.vllm == "cpu":
        print("the server computes on the CPU, for which the installed build of vLLM is made", flush=True)
    if draft.trainer.ray.address is None and (lack := lack_of_cpus(draft.machine, draft.trainer.ranks)):
        print(f"warning: {lack}", flush=True)
    return draft


def file_systems(draft: Draft) -> Draft:
    """Say what is done otherwise on the file systems of the run directory."""
    run = draft.config.run_directory()
    for remark in remarks([run.path, run.checkpoints]):
        print(remark, flush=True)
    return draft


def file_systems_here(draft: Draft) -> Draft:
    """Only whether the folders can be used: what a network file system can do is tried out with files."""
    run = draft.config.run_directory()
    found = [file_system_of(folder) for folder in (run.path, run.checkpoints)]
    if any(one.is_network and one.kind not in BUCKETS for one in found):
        return draft.leaving_out("what the network file system of the run directory can do")
    return file_systems(draft)
