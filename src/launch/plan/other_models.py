"""The other models of a run: those trained with the policy (a critic), and those that score its batches.

The weights that a run starts from (`start`) are in no checkpoint; a resumed run takes them from where they
were. So the recipe keeps the folder and checksums of every model that scores batches.
"""

import contextlib
import json
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.checkpoint.step_folder import CRITIC, StepFolder
from cairn.config.kinds import RunConfig, RunKind
from cairn.config.model import ModelConfig
from cairn.config.teachers import POLICY_AGAIN, START, WithTeachers, is_served
from cairn.config.trainer import TrainerBase
from cairn.launch.plan.model import described, is_step, resolve_model, vocabulary_size
from cairn.launch.start import Start
from cairn.model.described import changed, sums_of, weight_files
from cairn.run.errors import UsageError
from cairn.run.recipe import tokenizer_files, tokenizer_of

STEMS: Mapping[str, str] = {"critic": CRITIC}
"""Of the weights in a checkpoint, by section."""
MODELS = "models"
"""Key of the trainer's recipe for the models that score batches: by source, `folder` and sums of `files`."""
SAME_TOKENS = "It has to read the policy's tokens: take a model of the same family"


def with_auxiliary_models(kind: RunKind, config: RunConfig, start: Start, cache: Path) -> RunConfig:
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
        for section, one in trainer.auxiliary_models.items()
        if one.model != POLICY_AGAIN
    }
    return kind.with_trainer(config, trainer.beginning_as(folders)) if folders else config


def check_auxiliary_models(trainer: TrainerBase, start: Start, flags: str) -> None:
    """Check that the checkpoint has the models that are to be trained, and no other ones.

    Args:
        flags: what the trainer's flags begin with.

    Raises:
        UsageError: it has not.
    """
    assert start.folder is not None
    model = f"{flags.removesuffix('trainer.')}model.name {start.folder}"
    for section, stem in STEMS.items():
        saved, wanted = bool(StepFolder(start.folder).tensors(stem)), section in trainer.auxiliary_models
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
    if folder is not None:
        check_vocabulary(policy, folder, setting, without_tokenizer=True)
    return folder


@dataclass(frozen=True)
class Teachers:
    """Finds the folders of a run's other models.

    model: the run's own, as the user gave it. flags: what the flags of the trainer's settings begin with.
    cache: folder for weights that must be converted.
    """

    model: ModelConfig
    start: Start
    flags: str
    cache: Path

    def settle(self, config: TrainerBase, policy: Path, recipe: dict[str, Any]) -> dict[str, str]:
        """The sources of the models, by column, with folders in the place of names; `recipe` notes them.

        Args:
            policy: Hugging Face directory that the run starts or resumes from.
            recipe: the trainer's part.

        Raises:
            UsageError: a model is not there, is not what it was, or has another vocabulary.
        """
        sources: dict[str, str] = {}
        found: dict[str, dict[str, Any]] = {}
        noted: dict[str, Any] = {START: saved} if (saved := self._noted(START)) else {}
        for column, source in config.teachers.items():
            sources[column] = source
            if is_served(source):
                continue
            flag = f"{self.flags}{WithTeachers.sources_of[column]}"
            if source not in found:
                noted[source] = found[source] = self._find(source, flag, policy)
                if source != START:
                    check_vocabulary(policy, Path(found[source]["folder"]), f"{flag} {source}")
            sources[column] = found[source]["folder"]
        if noted:
            recipe[MODELS] = noted
        return sources

    def _find(self, source: str, flag: str, policy: Path) -> dict[str, Any]:
        """The folder of a model, and the sums of its files."""
        saved = self._noted(source)
        if source == START and self.start.folder is not None:
            if saved is None:
                raise UsageError(
                    f"{flag} {source}: {self.start.folder} does not say which weights its run started from, "
                    f"as that had no use for them; give their folder: {flag} FOLDER"
                )
            return self._start_again(saved, flag)
        folder = policy if source == START else self._resolve(source, flag)
        found = {"folder": str(folder), "files": _sums(folder, f"{flag} {source}")}
        if saved and (names := changed(saved["files"], found["files"])):
            raise UsageError(
                f"{flag} {source}: {names[0]} in {folder} is not what it was when the run began: put back "
                "what was there, or give another name for another model"
            )
        return found

    def _start_again(self, saved: Mapping[str, Any], flag: str) -> dict[str, Any]:
        """The weights that the run started from, from where they were, or from `--model.name`."""
        problems: list[str] = []
        for find in (lambda: Path(saved["folder"]), self._own_model):
            folder = find()
            if folder is None:
                continue
            if not (folder / "config.json").is_file():
                problems.append(f"{folder} is gone")
            elif names := changed(saved["files"], _sums(folder, f"{flag} {START}")):
                problems.append(f"{names[0]} in {folder} is not what it was")
            else:
                return {"folder": str(folder), "files": dict(saved["files"])}
        raise UsageError(
            f"{flag} {START}: the weights that the run started from can't be had: "
            f"{'; '.join(dict.fromkeys(problems))}. Put them back, or give their folder as --model.name"
        )

    def _own_model(self) -> Path | None:
        if not self.model.name:
            return None
        try:
            return Path(resolve_model(self.model, self.cache))
        except UsageError:
            return None

    def _resolve(self, source: str, flag: str) -> Path:
        with _of_setting(flag):
            return Path(resolve_model(ModelConfig(name=source), self.cache))

    def _noted(self, source: str) -> Mapping[str, Any] | None:
        """What the checkpoint's recipe says of a model."""
        if self.start.folder is None:
            return None
        state = StepFolder(self.start.folder).trainer_state()
        models: Mapping[str, Any] = ((state and state.recipe) or {}).get(MODELS, {})
        return models.get(source)


def _sums(folder: Path, about: str) -> dict[str, str]:
    try:
        return sums_of(weight_files(folder))
    except OSError as error:
        raise UsageError(f"{about}: {error.filename}: {error.strerror}") from None


def check_source(source: str, policy: Path, flag: str) -> None:
    """Check without its weights that a model can score what the policy samples; nothing is written.

    Args:
        source: a folder, or a name on the hub.
        policy: a directory with its configuration and tokenizer.
        flag: that names the source.

    Raises:
        UsageError: as at a start.
    """
    with _of_setting(flag):
        folder = described(ModelConfig(name=source))
    if folder is not None:
        check_vocabulary(policy, folder, f"{flag} {source}")


@contextlib.contextmanager
def _of_setting(flag: str) -> Generator[None]:
    """Errors name `flag` in the place of the run's own model."""
    try:
        yield
    except UsageError as error:
        raise UsageError(str(error).replace("--model.name", flag)) from None


def check_vocabulary(policy: Path, other: Path, about: str, *, without_tokenizer: bool = False) -> None:
    """See that two models mean the same by a token's number, and that `other` has a row for each token.

    Models of one family often differ in the rows that pad their embeddings; these stand for no token.

    Args:
        without_tokenizer: whether `other` may have no tokenizer, such as the critic of a checkpoint.

    Raises:
        UsageError: they do not, or it can't be known.
    """
    ours = _tokens(policy)
    rows, of_policy = (vocabulary_size(folder) for folder in (other, policy))
    needed = 1 + max(ours.values()) if ours else of_policy
    if rows < min(needed, of_policy):
        raise UsageError(
            f"{about}: its embeddings have {rows} rows, and the policy's tokens need {needed}. {SAME_TOKENS}"
        )
    if tokenizer_of(policy) == tokenizer_of(other) or (without_tokenizer and not tokenizer_files(other)):
        return
    theirs = _tokens(other)
    if ours is None or theirs is None:
        without = policy if ours is None else other
        raise UsageError(
            f"{about}: whether it has the policy's vocabulary can't be told, as {without} has no "
            "tokenizer.json, and their tokenizers' files differ: give a folder that has one (transformers' "
            "save_pretrained writes it), or have a server serve the model if it is a teacher or a reference"
        )
    if different := [token for token, number in ours.items() if theirs.get(token) != number]:
        token = different[0]
        raise UsageError(
            f"{about}: its vocabulary is another than the policy's: {token!r} is token {ours[token]} in "
            f"{policy}, and {theirs.get(token, 'no token')} in {other}. {SAME_TOKENS}"
        )


def _tokens(folder: Path) -> dict[str, int] | None:
    """The number of each token, by its text; None without a tokenizer.json."""
    try:
        content = json.loads((folder / "tokenizer.json").read_text())
        vocabulary = content["model"]["vocab"]
        tokens = (
            {str(token): number for token, number in vocabulary.items()}
            if isinstance(vocabulary, dict)
            else {str(entry[0]): number for number, entry in enumerate(vocabulary)}
        )
        return tokens | {added["content"]: added["id"] for added in content.get("added_tokens", [])}
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
