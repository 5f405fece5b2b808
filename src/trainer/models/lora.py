"""Puts low-rank adapters (LoRA, Hu et al. 2021) into a model, through PEFT's layers.

A layer of weights W [outputs, inputs] computes W x + s B A x, where A [rank, inputs] and B [outputs, rank]
are trained, W is not, and s is alpha / rank (or alpha / sqrt(rank)). A begins with random values, B with
zeros.
"""

import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from cairn.config.model import ALL_LINEAR, LoraConfig
from cairn.run.errors import UsageError

logger = logging.getLogger(__name__)

NAME = "default"
"""What PEFT calls the one adapter of a model."""
IS_HEAD = "it is the head, which can be trained in full: lora.modules_to_save"
"""Why there is no adapter of the layer that computes logits."""


def adapt(model: PreTrainedModel, config: LoraConfig) -> None:
    """Put adapters into a model whose weights are on the meta device, and have nothing else trained.

    Raises:
        UsageError: a target is no linear layer of the model, or can't be adapted.
    """
    from peft import inject_adapter_in_model  # which takes a second to import

    targets = targets_in(model, config)
    kept = modules_in(model, config)
    if inside := [name for name in targets if any(_within(name, module) for module in kept)]:
        raise UsageError(
            f"lora.modules_to_save = {config.modules_to_save}: {inside[0]} is trained in full with it, and "
            "has an adapter by lora.targets; choose one of them"
        )
    # PEFT would keep a copy of what is trained in full; here it is trained in place.
    peft = peft_config(config, model, targets, [])
    try:
        inject_adapter_in_model(peft, model, NAME, low_cpu_mem_usage=True)
    except ValueError as error:  # such as of layers that a model's kernels read without calling them
        who = f"PEFT refuses {type(model).__name__}"
        raise UsageError(f"lora.targets = {config.targets}: {who}: {str(error).splitlines()[0]}") from None
    for name, parameter in model.named_parameters():
        whole = any(_within(name, module) for module in kept)
        parameter.requires_grad_(whole or is_adapters(name))


def targets_in(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """The names of the layers that get an adapter.

    Raises:
        UsageError: a name matches none that can have one.
    """
    unfit = _linear_layers(model)
    allowed = [name for name, problem in unfit.items() if problem is None]
    if config.targets == [ALL_LINEAR]:
        chosen = allowed
        for problem in sorted({p for p in unfit.values() if p and p != IS_HEAD}):
            logger.info("lora.targets = all-linear leaves out layers: %s", problem)
    else:
        chosen = [name for name in allowed if any(_ends(name, target) for target in config.targets)]
    ends = sorted({name.rpartition(".")[2] for name in allowed})
    unmatched = [t for t in config.targets if t != ALL_LINEAR and not any(_ends(n, t) for n in chosen)]
    if unmatched or not chosen:
        what = unmatched[0] if unmatched else ALL_LINEAR
        others = [name for name, _ in model.named_parameters() if any(_within(name, t) for t in unmatched)]
        why = f"; {others[0]} is not of a linear layer" if others else ""
        if problem := next((p for name, p in unfit.items() if p and _ends(name, what)), None):
            why = f"; {problem}"
        raise UsageError(
            f"lora.targets: {what!r} matches no linear layer of {type(model).__name__} that can have an "
            f"adapter{why}. There are: {', '.join(ends) or 'none'}"
        )
    return chosen


def _linear_layers(model: PreTrainedModel) -> dict[str, str | None]:
    """The names of all linear layers, each with the reason why it can't have an adapter, if there is one."""
    head, decoder = model.get_output_embeddings(), model.get_decoder()
    of_text = {id(module) for module in decoder.modules()}
    linear = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    renamed = _experts_to_peft(model, {name.rpartition(".")[2] for name in linear})

    def problem(name: str, module: torch.nn.Linear) -> str | None:
        end = name.rpartition(".")[2]
        if module is head:
            return IS_HEAD
        if id(module) not in of_text:
            return f"{end} is in a part of the model that text does not go through"
        if end in renamed:
            return f"PEFT takes {end} for the experts' layers of that name, in this family"
        if not _gives_outputs(module):
            return f"{end} ({type(module).__name__}) computes more than a linear layer does"
        return None

    return {name: problem(name, module) for name, module in linear.items()}


def _experts_to_peft(model: PreTrainedModel, ends: set[str]) -> set[str]:
    """Those of these names by which PEFT means experts that transformers holds as one tensor.

    In the configuration of an adapter it replaces such names by those of the experts' tensors, so that shared
    experts and dense layers of the same name would get none.
    """
    from peft import LoraConfig as PeftConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    from transformers.conversion_mapping import get_model_conversion_mapping

    conversions = get_model_conversion_mapping(model)
    found: set[str] = set()
    for end in ends:
        config = PeftConfig(target_modules=[end])
        try:
            convert_peft_config_for_transformers(config, model=model, conversions=conversions)
        except ValueError:  # the name is one of several that stand for one tensor
            found.add(end)
            continue
        if config.target_modules != {end}:
            found.add(end)
    return found


@torch.no_grad()
def _gives_outputs(module: torch.nn.Linear) -> bool:
    """Whether a module computes one tensor of outputs; routers that extend nn.Linear choose experts, too."""
    if type(module).forward is torch.nn.Linear.forward:
        return True
    inputs = torch.empty(1, module.in_features, device=module.weight.device, dtype=module.weight.dtype)
    outputs: object = module(inputs)
    return isinstance(outputs, torch.Tensor) and outputs.shape == (1, module.out_features)


def modules_in(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """The names of the modules that are trained in full.

    Raises:
        UsageError: a name matches none with weights, or one with weights that are tied to another module's.
    """
    with_weights = [
        name for name, module in model.named_modules() if name and any(True for _ in module.parameters())
    ]
    kept: list[str] = []
    for wanted in config.modules_to_save:
        found = [name for name in with_weights if _ends(name, wanted)]
        if not found:
            ends = sorted({name.rpartition(".")[2] for name in with_weights} - {str(n) for n in range(1000)})
            raise UsageError(
                f"lora.modules_to_save: {wanted!r} matches no module of {type(model).__name__}. There are: "
                + ", ".join(ends)
            )
        kept += found
    tied = model.all_tied_weights_keys
    for name in (*tied, *tied.values()):
        if any(_within(name, module) for module in kept):
            raise UsageError(
                f"lora.modules_to_save = {config.modules_to_save}: {name} is tied to another module's weight "
                f"in {type(model).__name__}, and programs that load an adapter would untie them"
            )
    return kept


def peft_config(config: LoraConfig, model: PreTrainedModel, targets: list[str], kept: list[str]) -> Any:
    """The same as PEFT has it."""
    from peft import LoraConfig as PeftConfig

    alpha = config.alpha
    return PeftConfig(
        r=config.rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=config.dropout,
        target_modules=short(model, targets),
        use_rslora=config.rslora,
        modules_to_save=kept or None,
        task_type="CAUSAL_LM",
    )


def short(model: PreTrainedModel, targets: list[str]) -> list[str]:
    """The last parts of names if they mean just these modules, as is usual in PEFT; else the names."""
    ends = sorted({name.rpartition(".")[2] for name in targets})
    meant = {name for name, _ in model.named_modules() if any(_ends(name, end) for end in ends)}
    return ends if meant == set(targets) else targets


def plain(name: str) -> str:
    """The name of a parameter without what PEFT adds to it."""
    return name.replace(".base_layer.", ".").replace(f".{NAME}.", ".")


def is_adapters(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _ends(name: str, end: str) -> bool:
    """Whether a module's name is `end`, or ends with it after a dot."""
    return name == end or name.endswith(f".{end}")


def _within(name: str, module: str) -> bool:
    """Whether a parameter's or module's name is in a module, of which the name or its end is given."""
    return f".{module}." in f".{name}."
