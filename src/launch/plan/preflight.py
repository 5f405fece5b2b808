"""What template, tokenizer, model and lengths make of a run's data: found out before anything is started.

The start of a run and `--dry-run` both call `preflight`. It goes through `CHECKS` in a process of its own,
which imports tokenizers without torch, since the launcher imports neither.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cairn.config.kinds import KINDS, RunConfig, RunKind
from cairn.config.trainer import TrainerBase
from cairn.run.errors import CairnError, UsageError


@dataclass(frozen=True)
class Subject:
    """What is looked at.

    model: Hugging Face directory with the policy's configuration and tokenizer; of its weights nothing is
    read. facts: what only the launcher knows, as JSON; each check says what it takes from there.
    """

    kind: RunKind
    config: RunConfig
    model: Path
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def trainer(self) -> TrainerBase:
        """The trainer's configuration; `task` says what is trained on."""
        return self.kind.trainer(self.config)

    @property
    def flags(self) -> str:
        """What the flags of the trainer's settings begin with."""
        return self.kind.flags("trainer")

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The policy's tokenizer, loaded once for all checks.

        Raises:
            UsageError: it can't be loaded.
        """
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.model)
        except (OSError, ValueError, KeyError) as error:
            what = " ".join(str(error).split())
            raise UsageError(f"--model.name {self.model}: its tokenizer can't be loaded: {what}") from None


@dataclass(frozen=True)
class Check:
    """One thing that is found out.

    name: for messages, if it fails itself. tasks: of trainers whose runs it looks at. look: gives notices,
    which are printed, each a line; raises UsageError where the run should not start.
    """

    name: str
    tasks: frozenset[str]
    look: Callable[[Subject], Iterator[str]]


def what_is_read(trainer: TrainerBase) -> Iterator[str]:
    """Which files of folders are trained on and which are not, a line for each folder."""
    from cairn.run import data_sets

    settings: Any = trainer
    found: dict[str, None] = {}
    for source in (*settings.data.all_sets, *trainer.held_out_data.values()):
        with contextlib.suppress(data_sets.BadRecord):  # which is an error once the records are read
            if said := data_sets.what_is_read(source):
                found[said] = None
    yield from (f"data: {said}" for said in found)


def _limits(subject: Subject) -> Iterator[str]:
    """No token is beyond the positions that a model has learned, and each has a row of embeddings."""
    from cairn.trainer.data.looking import limits_of

    length, setting = subject.trainer.seq_len, f"{subject.flags}seq-len"
    folders = {"the model": subject.model}
    for section, one in subject.trainer.auxiliary_models.items():
        folders[f"the model of {section}"] = Path(one.model)
    for name, folder in folders.items():
        positions = limits_of(folder).positions
        if positions is not None and length > positions:
            raise UsageError(
                f"{setting} {length}: {name} ({folder}) has {positions} learned positions, and none for the "
                f"tokens behind them; give {setting} {positions} or less"
            )
    rows = limits_of(subject.model).rows
    beyond = {
        number: token for token, number in subject.tokenizer.get_vocab().items() if number >= (rows or 0)
    }
    if rows and beyond:
        first = min(beyond)
        yield (
            f"warning: the tokenizer has {len(beyond)} tokens without a row in the model's embeddings (of "
            f"{rows} rows), such as {beyond[first]!r} ({first}); what has one of them is refused"
        )


def _data(subject: Subject) -> Iterator[str]:
    """Every record has a form that can be trained on, the template shows all of it, and what is learned of a
    drawn sample is no surprise."""
    from cairn.run.conversations import end_tokens
    from cairn.run.data_sets import BadRecord
    from cairn.trainer.data.looking import limits_of, look_at_data
    from cairn.trainer.data.opening import identity_of_all, open_sources
    from cairn.trainer.data.preference_forms import FORMS
    from cairn.trainer.data.sources import SFT

    trainer: Any = subject.trainer
    yield from what_is_read(trainer)
    answers = trainer.task != "reward"
    ends = end_tokens(subject.model, subject.tokenizer.eos_token_id) if answers else None
    use = SFT if trainer.task == "sft" else FORMS[trainer.loss.form]
    all_data = [("", f"{trainer.data.setting} ", trainer.data, use)]
    for name, data in trainer.held_out_data.items():
        all_data.append((f"validation {name!r}: ", f"validation {name!r}: ", data, SFT))
    for whose, setting, data, use in all_data:
        try:
            sources = open_sources(data, trainer.seed, use)
            if not subject.facts.get("records_are_checked"):
                identity_of_all(data, sources, use)
            for notice in look_at_data(
                sources.values(),
                data,
                use,
                subject.tokenizer,
                seed=trainer.seed,
                row_length=trainer.seq_len,
                limits=limits_of(subject.model),
                ends=ends,
            ):
                yield f"{whose}{notice}"
        except BadRecord as error:  # as of all records
            raise UsageError(f"{setting}{error}") from None
        except UsageError as error:
            raise UsageError(f"{whose}{error}") from None


def _prompts(subject: Subject) -> Iterator[str]:
    """Problems can be asked with the model's template, and rollouts are not longer than what is learned."""
    from cairn.config.rl_trainer import TrainerConfig
    from cairn.orchestrator.completion.chat import ChatFormat
    from cairn.orchestrator.prompts.prompt_lengths import context_by, look_at_prompts

    facts, trainer = dict(subject.facts), subject.trainer
    if not facts.get("asked"):
        return
    assert isinstance(trainer, TrainerConfig)  # only those have the task
    if facts["context_is_the_models"]:
        facts["context"] = context_by(subject.model)
    yield from look_at_prompts(
        facts,
        ChatFormat(subject.model),
        seq_len=trainer.seq_len,
        cut_rollouts=trainer.cut_rollouts,
        flags=subject.flags,
    )


ON_RECORDS = frozenset({"sft", "dpo", "reward"})
ON_PROMPTS = frozenset({"rl"})
ALL = ON_RECORDS | ON_PROMPTS
CHECKS = (
    Check("limits", ALL, _limits),
    Check("data", ON_RECORDS, _data),
    Check("prompts", ON_PROMPTS, _prompts),
)
"""In this order; all look, also if one has refused the run, so that all that is wrong is reported at once."""


def look_at_records(trainer: TrainerBase) -> dict[str, Any]:
    """Check that every record has a form that can be trained on, also the held-out ones.

    Data on the hub is downloaded here, before all ranks need it.

    Returns:
        What the recipe says of the records: `data`, their identity, unless batches come from an orchestrator;
        and `validations`, the identity of the held-out ones by validation, if there are any.

    Raises:
        UsageError: a record can't be used, or the data not be read.
    """
    from cairn.run.data_sets import BadRecord, examine, load_records
    from cairn.trainer.data.opening import identity_of_records
    from cairn.trainer.data.records import problem_of

    try:
        identity = identity_of_records(trainer)
    except BadRecord as error:
        raise UsageError(str(error)) from None
    found: dict[str, Any] = {} if identity is None else {"data": identity}
    for name, data in trainer.held_out_data.items():
        try:
            found.setdefault("validations", {})[name] = examine(data, load_records(data), problem_of)
        except BadRecord as error:
            raise UsageError(f"validation {name!r}: {error}") from None
    return found


@dataclass(frozen=True)
class Found:
    """notices: to be printed, one a line. errors: why the run should not start."""

    notices: list[str]
    errors: list[str]


def preflight(kind: RunKind, config: RunConfig, model: Path, facts: Mapping[str, Any] | None = None) -> Found:
    """Go through all checks in a process of its own.

    Args:
        model: see `Subject`.
        facts: likewise; as JSON.
    """
    if not any(kind.trainer(config).task in check.tasks for check in CHECKS):
        return Found([], [])
    request = {
        "command": kind.command,
        "config": config.model_dump(mode="json"),
        "model": str(model),
        "facts": dict(facts or {}),
    }
    done = subprocess.run(
        [sys.executable, "-m", "cairn.launch.plan.preflight", str(os.getpid())],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        return Found(**json.loads(done.stdout))
    except ValueError:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Found([f"warning: what the model makes of the data could not be looked at: {last}"], [])


def look(subject: Subject) -> Found:
    """Go through all checks in this process.

    A check that fails for another reason than the subject's settings becomes a notice: what it would have
    found is then met by the run itself.
    """
    found = Found([], [])
    for check in CHECKS:
        if subject.trainer.task not in check.tasks:
            continue
        try:
            found.notices.extend(check.look(subject))
        except CairnError as error:
            if str(error) not in found.errors:
                found.errors.append(str(error))
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            found.notices.append(f"warning: {check.name} could not be looked at before the start: {what}")
    return found


@contextlib.contextmanager
def _without_torch() -> Generator[None]:
    """An import of torch fails here, as if it were not installed.

    transformers tries that when it is imported, and then has tokenizers alone; that takes one second instead
    of five.
    """
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType] # this makes an import fail
    try:
        yield
    finally:
        del sys.modules["torch"]


def main() -> None:
    """Answer the request on standard input."""
    from cairn.run.processes import die_with

    die_with(int(sys.argv[1]))
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no part of the answer
    with _without_torch():
        import transformers  # noqa: F401
    request = json.load(sys.stdin)
    kind = KINDS[request["command"]]
    config = kind.config.model_validate(request["config"])
    found = look(Subject(kind, config, Path(request["model"]), request["facts"]))
    json.dump({"notices": found.notices, "errors": found.errors}, answer)
    answer.close()


if __name__ == "__main__":
    main()
