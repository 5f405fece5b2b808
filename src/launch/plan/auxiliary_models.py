"""The models that are trained beside the policy, before anything starts: where they begin."""

from collections.abc import Callable, Mapping
from pathlib import Path

from cairn.checkpoint.step_folder import CRITIC, StepFolder
from cairn.config.critic import POLICY_AGAIN
from cairn.config.kinds import RunConfig, RunKind
from cairn.config.model import ModelConfig
from cairn.config.trainer import TrainerBase
from cairn.launch.plan.model import described, is_step, resolve_model, vocabulary_size
from cairn.launch.plan.start import Start
from cairn.run.errors import UsageError
from cairn.run.recipe import TOKENIZER_FILES

STEMS: Mapping[str, str] = {"critic": CRITIC}
"""Of the weights in a checkpoint, by section."""


def with_models_beside(kind: RunKind, config: RunConfig, start: Start, cache: Path) -> RunConfig:
    """The configuration with local folders for these models; a run that resumes takes its checkpoint's.

    Args:
        config: its model is resolved.
        cache: folder for converted weights.

    Raises:
        UsageError: there is no such model, or it has another vocabulary than the policy.
    """
    trainer = kind.trainer(config)
    if start.folder is not None:
        return config
    folders = {
        section: str(_folder(section, one.model, Path(config.model.name), cache, kind.flags("trainer")))
        for section, one in trainer.models_beside.items()
        if one.model != POLICY_AGAIN
    }
    return kind.with_trainer(config, trainer.beginning_as(folders)) if folders else config


def check_models_beside(trainer: TrainerBase, start: Start, flags: str) -> None:
    """Check that the checkpoint has the models that are to be trained, and no other ones.

    Args:
        flags: what the trainer's flags begin with.

    Raises:
        UsageError: it has not.
    """
    assert start.folder is not None
    model = f"{flags.removesuffix('trainer.')}model.name {start.folder}"
    for section, stem in STEMS.items():
        saved, wanted = bool(StepFolder(start.folder).tensors(stem)), section in trainer.models_beside
        if wanted and not saved:
            raise UsageError(
                f"{start.folder} has no {section}, and a run can't get one on its way. Leave out "
                f"{flags}{section}, or begin a new run with its weights: {model} and another output_dir"
            )
        if saved and not wanted:
            raise UsageError(
                f"{start.folder} has a {section}, and this run is without: it would be lost. Give "
                f"{flags}{section} as before, or begin a new run with the policy's weights: {model} and "
                "another output_dir"
            )


def check_beside(section: str, name: str, policy: Path, flags: str) -> None:
    """Check without its weights that a model can be trained beside the policy.

    Args:
        policy: a directory with its configuration and tokenizer.

    Raises:
        UsageError: as at a start.
    """
    _found(section, name, policy, flags, described)


def _folder(section: str, name: str, policy: Path, cache: Path, flags: str) -> Path:
    folder = _found(section, name, policy, flags, lambda model: Path(resolve_model(model, cache)))
    assert folder is not None
    return folder


def _found(
    section: str, name: str, policy: Path, flags: str, find: Callable[[ModelConfig], Path | None]
) -> Path | None:
    """The folder that `find` has found, or the part of it that is the section's, with the policy's tokens."""
    setting = f"{flags}{section}.model {name}"
    try:
        folder = find(ModelConfig(name=name))
    except UsageError as error:
        raise UsageError(str(error).replace(f"--model.name {name}", setting)) from None
    own = Path(name) / Path(STEMS[section]).parent
    if Path(name).is_dir() and is_step(Path(name)) and (own / "config.json").is_file():
        folder = own.absolute()
    if folder is not None and (problem := _vocabulary_problem(folder, policy)):
        raise UsageError(f"{setting}: {problem}, so that it would read other tokens than the policy writes")
    return folder


def _vocabulary_problem(folder: Path, policy: Path) -> str | None:
    """What is wrong with the model's tokens for a policy; None if nothing is."""
    sizes = [vocabulary_size(one) for one in (folder, policy)]
    has_tokenizer = any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern))
    if not has_tokenizer:  # such as the critic of a checkpoint
        return f"it knows {sizes[0]} tokens, and the policy {sizes[1]}" if sizes[0] < sizes[1] else None
    from transformers import AutoTokenizer  # late: it takes seconds

    ours, theirs = (AutoTokenizer.from_pretrained(one).get_vocab() for one in (folder, policy))
    if ours == theirs:
        needed = 1 + max(ours.values())
        if sizes[0] < min(needed, sizes[1]):
            return f"its embeddings have {sizes[0]} rows, and the policy's tokens need {needed}"
        return None
    other = sum(theirs.get(token) != number for token, number in ours.items())
    return f"its tokenizer's vocabulary is not the policy's ({other} of its {len(ours)} tokens differ)"
