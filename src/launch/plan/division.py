"""Which GPUs each role gets, and how many each server of a run needs, where the user leaves that open."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.config.inference import InferenceConfig
from cairn.config.kinds import KINDS
from cairn.config.model import ModelConfig
from cairn.config.rl import RLConfig
from cairn.launch.memory import SERVED, Uncountable, count, count_models, needs_of_server, serving_needs
from cairn.launch.needs import UTILIZATION, Need, cache_left, gib
from cairn.launch.plan.gpu_assignment import placed, placed_server
from cairn.launch.plan.model import described, model_to_serve
from cairn.launch.plan.run_plan import Draft
from cairn.launch.plan.settings import Choice
from cairn.launch.plan.simulation import ModelShape, SimulatedWork, SplitOutcome, fastest, splits_of
from cairn.run.errors import CairnError
from cairn.run.machine import Machine

if TYPE_CHECKING:
    from cairn.trainer.models.footprint import Footprint  # which imports torch

PROMPT, MOST_ANSWERS = 512, 1024
"""Tokens of a prompt, and the answers of a step for each 16 GPUs, in a simulation; more are left out."""
CACHE_SHARE = 4
"""Keys and values get at least one part in so many of the memory that vLLM takes: with less, a server answers
few requests at a time, and reads its weights for each few tokens."""


def has_several_gpus(draft: Draft) -> bool:
    """Whether the command's own servers run on GPUs, and there are several to choose from."""
    several = len(draft.machine.gpus) > 1 and draft.vllm == "gpu"
    return draft.own_server and several and not draft.config.colocate and draft.config.inference.gpus != "0"


def with_servers_chosen(draft: Draft) -> Draft:
    """With the size and the number of the run's servers, where they are open and the model can be counted."""
    return _with_fastest_split(_with_size_of_servers(draft))


def _with_size_of_servers(draft: Draft) -> Draft:
    """With the number of GPUs that each of the run's servers needs, by the estimate of its memory."""
    config: RLConfig = draft.config
    if config.inference.tensor_parallel is not None or config.inference.size > 1:
        return draft
    most = len(draft.machine.gpus) - 1  # one trains at least
    size, why = size_by_memory(lambda: _folder(draft), config.inference, draft.machine, most)
    return _choosing(draft, "tensor_parallel", size, why)


def _with_fastest_split(draft: Draft) -> Draft:
    """With the number of servers that makes the run the fastest, by a simulation of its steps.

    Of those at which the trainer fits into its GPUs by estimate. If the model can't be counted, or nothing
    fits, the number stays open, and half of the GPUs serve.
    """
    config: RLConfig = draft.config
    trainer, inference, gpus = config.trainer, config.inference, draft.machine.gpus
    given = (inference.servers, inference.gpus, trainer.gpus, trainer.workers, trainer.ray.address)
    if any(value is not None for value in given):
        return draft
    try:
        found = fastest_division(config, _folder(draft), draft.machine, len(gpus))
    except UNKNOWN:
        return draft
    return draft if found is None else _choosing(draft, "servers", found[0].split.servers, found[1])


UNKNOWN = (Uncountable, CairnError, OSError, ValueError, KeyError)
"""What is raised of a model that can't be counted; what is wrong is said by those that count for its sake."""


def fastest_division(
    config: RLConfig, folder: str, machine: Machine, gpus: int, *, node: int = 1
) -> tuple[SplitOutcome, str] | None:
    """The division of so many GPUs that makes the run the fastest, by a simulation of its steps, and why.

    Of those at which the ranks fit into their GPUs by estimate; None if they don't with any.

    Args:
        folder: describes the model.
        machine: whose GPUs are such as all are.
        gpus: in all. node: how many of them only serve together, or train together; servers are as large as
            the settings say.

    Raises:
        UNKNOWN: the model can't be counted.
    """
    trainer, inference = config.trainer, config.inference
    memory = min(gpu.memory for gpu in machine.gpus)
    counted = count(folder, **SERVED)
    whole = needs_of_server(counted, folder, inference.model_copy(update={"tensor_parallel": 1}))
    model = shape_of(Path(folder), counted)
    cache = cache_left(split(whole, inference.size), memory) * inference.size // model.key_value_bytes
    work = _work(config, gpus)
    splits = splits_of(gpus, inference.size, cache, step=node)
    if node > 1 and inference.servers is not None:  # so many of a node's
        splits = [replace(one, servers=(gpus - one.ranks) // node * inference.servers) for one in splits]
    splits = [one for one in splits if trainer.problem_of_ranks(one.ranks) is None]
    if not splits:
        return None
    trained = count_models(folder, trainer.settled(gpu=True), machine)
    for number, best in enumerate(fastest(model, work, splits)):
        settled = trainer.settled(gpu=True).model_copy(update={"workers": best.split.ranks})
        if trained.needs(settled, machine).rank.total <= memory:
            first = "the fastest" if not number else "the fastest of those at which the ranks fit"
            return best, (
                f"{first} of {len(splits)} divisions in a simulation with answers of {work.mean} tokens "
                f"(half of sampling.max_tokens): {best.in_words}"
            )
    return None


def _choosing(draft: Draft, setting: str, value: int, why: str) -> Draft:
    """With a setting of the servers, and its reason."""
    inference = draft.config.inference.model_copy(update={setting: value})
    return draft.having(
        config=draft.config.model_copy(update={"inference": inference}),
        choices=(*draft.choices, Choice(f"inference.{setting}", value, why)),
    )


def shape_of(folder: Path, counted: "Footprint") -> ModelShape:
    """What the simulation has to know of the model in `folder`, by its config.json.

    Raises:
        OSError, ValueError, KeyError: it can't be read, or does not say it.
    """
    settings: dict[str, Any] = json.loads((folder / "config.json").read_text())
    settings = settings.get("text_config") or settings
    heads, layers = settings["num_attention_heads"], settings["num_hidden_layers"]
    width = settings.get("head_dim") or settings["hidden_size"] // heads
    each = 2 * layers * (settings.get("num_key_value_heads") or heads) * width
    return ModelShape(
        counted.elements, layers, settings["hidden_size"], 2 * each, counted.experts, counted.chosen
    )


def _work(config: RLConfig, gpus: int) -> SimulatedWork:
    """A step of the run, if answers have half of the tokens that they may have; of few prompts if there are
    many for so many GPUs, since a part is enough."""
    orchestrator, longest = config.orchestrator, config.orchestrator.sampling.max_tokens
    samples = orchestrator.samples_per_prompt
    most = MOST_ANSWERS * max(1, gpus // 16) // samples
    return SimulatedWork(
        prompts=max(1, min(orchestrator.prompts_per_step, most)),
        samples=samples,
        prompt=PROMPT,
        mean=max(1, longest // 2),
        longest=longest,
        behind=orchestrator.max_off_policy_steps,
        again=config.trainer.activation_checkpointing,
    )


def with_gpus(draft: Draft) -> Draft:
    """With the GPUs of each role, and so the roles that are started.

    Raises:
        UsageError: see `gpu_assignment.place`.
    """
    config, machine = draft.config, draft.machine
    if draft.command in KINDS:
        config, placing = placed(draft.kind, config, machine, draft.vllm, draft.taken)
        draft = draft.having(placing=placing, roles=draft.kind.started(config))
        if placing.server and draft.config.inference.servers is None:
            chosen = Choice("inference.servers", placing.servers, placing.why)
            draft = draft.having(choices=(*draft.choices, chosen))
        return draft.having(config=config)
    if draft.command == "inference":
        return draft.having(config=placed_server(config, machine, draft.vllm))
    server = placed_server(config.inference, machine, draft.vllm, "--inference.")
    return draft.having(config=config.model_copy(update={"inference": server}))


def _folder(draft: Draft) -> str:
    """A folder that describes the policy, of which the run's start may have one.

    Raises:
        CairnError, Uncountable: see `described_folder`.
    """
    if draft.start is not None and draft.start.folder is not None:
        return str(model_to_serve(draft.start.folder, draft.trainer.lora))
    return described_folder(draft.config.model)


def described_folder(model: ModelConfig) -> str:
    """A folder that describes the model; its weights are neither fetched nor made.

    Raises:
        Uncountable: none is given, or it is known only once its weights are converted.
        CairnError: the model would be refused.
    """
    folder = described(model) if model.name else None
    if folder is None:
        raise Uncountable("it is not known yet")
    return str(folder)


def size_by_memory(
    folder: Callable[[], str], config: InferenceConfig, machine: Machine, most: int
) -> tuple[int, str]:
    """The number of GPUs that one server needs, and why; 1 if the model can't be counted.

    It is the smallest power of two at which a copy of the model leaves enough for keys and values, and which
    divides the model's attention heads, as vLLM demands. If not even the largest is enough, it is that one,
    and the check of memory that follows says so.

    Args:
        folder: gives a Hugging Face directory of the model, whose weights are not read.
        machine: with GPUs.
        most: number of GPUs that a server may have.
    """
    try:
        memory = min(gpu.memory for gpu in machine.gpus)
        whole = serving_needs(found := folder(), config.model_copy(update={"tensor_parallel": 1}))
        heads = _heads(Path(found))
    except (Uncountable, CairnError, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        return 1, f"the model can't be counted ({reason}), so a copy of it on each GPU is tried"
    size = 1
    while not _leaves_enough(split(whole, size), memory) and 2 * size <= most and heads % (2 * size) == 0:
        size *= 2
    need = split(whole, size)
    return size, (
        f"of {gib(memory)} a GPU, the weights take {gib(need.counted)}, and about "
        f"{gib(cache_left(need, memory))} are left for keys and values"
    )


def split(whole: Need, size: int) -> Need:
    """What each of `size` GPUs needs for a server that needs `whole` with one GPU."""
    parts = (replace(part, bytes=part.bytes // size) if part.counted else part for part in whole.parts)
    return replace(whole, parts=tuple(parts))


def _leaves_enough(need: Need, memory: int) -> bool:
    return cache_left(need, memory) * CACHE_SHARE >= UTILIZATION * memory


def _heads(folder: Path) -> int:
    """The attention heads of the model, by its config.json; 1 if it does not say."""
    settings: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return int((settings.get("text_config") or settings).get("num_attention_heads") or 1)
