"""What a dry run finds in place of steps that touch disk or network, and what it prints in the end."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cairn.checkpoint.store import CheckpointStore
from cairn.config.kinds import RunConfig
from cairn.config.teachers import POLICY_AGAIN, START, WithTeachers, is_served
from cairn.launch.jobs.export import exports_in_words
from cairn.launch.plan.external_servers import facts_of_run
from cairn.launch.plan.hardware import machine_in_words
from cairn.launch.plan.model import described, model_to_serve
from cairn.launch.plan.other_models import check_beside, check_source
from cairn.launch.plan.preflight import preflight as looked_at
from cairn.launch.plan.run_plan import Draft, RunPlan
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.exits import EXIT_USAGE
from cairn.watch.sinks import problems_of_sinks


def report(plan: RunPlan) -> int:
    """Print the resolved configuration as JSON, and for people, on standard error, what it means.

    That is what was chosen for the machine and why, an estimate of the memory that is needed, and what the
    start would say of its checkpoint, data and models.

    Returns:
        The exit code: that of a start which would be refused, if one of the lines is an error.

    Raises:
        UsageError: the settings can't be settled.
    """
    print(settled(plan).model_dump_json(indent=2), flush=True)
    return explain(plan)


def settled(plan: RunPlan) -> RunConfig:
    """The resolved configuration.

    Raises:
        UsageError: the settings can't be settled.
    """
    if plan.settled is None:
        raise UsageError(plan.errors[0])
    return plan.settled


def explain(plan: RunPlan) -> int:
    """The part of `report` that is for people; returns the exit code."""
    lines = [f"planned for {machine_in_words(plan.machine)}", *(f"  {note}" for note in plan.notes)]
    if plan.placing is not None:
        about = plan.placing.in_words(), exports_in_words(plan.config)
        lines += [f"  {words}" for words in about if words]
    for choice in plan.choices:
        value = "vLLM's choice" if choice.value is None else choice.value
        lines.append(f"  {choice.setting} = {value}: {choice.why}")
    lines += plan.found
    if plan.missing and plan.command in ("orchestrator", "eval"):
        lines.append(f"not enough for a start: {plan.missing}")
    if plan.left_out:
        lines.append(f"a dry run leaves out: {'; '.join(plan.left_out)}")
    errors = [f"error: {error}" for error in dict.fromkeys(plan.errors)]
    lines += [error for error in errors if error not in lines]
    print("\n".join(lines), file=sys.stderr, flush=True)
    return EXIT_USAGE if any(line.startswith("error: ") for line in lines) else 0


def model(draft: Draft) -> Draft:
    """With a folder that has the policy's configuration and tokenizer; weights are neither fetched nor made.

    Raises:
        UsageError: a start would refuse the model.
    """
    if not draft.config.model.name:
        return draft
    if draft.start is not None and draft.start.folder is not None:
        return draft.having(model=str(model_to_serve(draft.start.folder, draft.trainer.lora)))
    folder = described(draft.config.model)
    return draft.having(model="" if folder is None else str(folder))


def teachers(draft: Draft) -> Draft:
    """Whether the models that score a run's batches have the policy's tokens."""
    flags = draft.kind.flags("trainer")
    sources = {column: one for column, one in draft.trainer.teachers.items() if not is_served(one)}
    if sources and draft.start is not None and draft.start.folder is not None:
        draft = draft.leaving_out("whether models that score batches are what they were")
    checks = (
        partial(check_source, source, flag=f"{flags}{WithTeachers.sources_of[column]}")
        for column, source in sources.items()
        if source != START
    )
    return _with_tokens(draft, *checks)


def trained_models(draft: Draft) -> Draft:
    """Whether the models that are trained with the policy have its tokens; a checkpoint has such models."""
    config, flags = draft.config, draft.kind.flags("trainer")
    if draft.start.folder is not None if draft.start else _goes_on(config):
        return draft
    checks = (
        partial(check_beside, section, one.model, flags=flags)
        for section, one in draft.trainer.auxiliary_models.items()
        if one.model != POLICY_AGAIN
    )
    return _with_tokens(draft, *checks)


def _with_tokens(draft: Draft, *checks: Callable[[Path], None]) -> Draft:
    if draft.model:
        return draft.finding(
            *(line for check in checks for line in refused(partial(check, Path(draft.model))))
        )
    if checks and "model" in draft.known and draft.config.model.name:
        what = "whether other models have the policy's tokens"
        return draft.finding(f"{what} is found out once its weights are converted")
    return draft


def preflight(draft: Draft) -> Draft:
    """What the start would say of data and model."""
    if draft.missing:
        return draft.finding(f"data and model are not looked at: {draft.missing}")
    if not draft.model:
        what = "what the model makes of the data is found out once its weights are converted"
        return draft.finding(what) if "model" in draft.known else draft
    facts = facts_of_run(draft, records_are_checked=bool(draft.recipe))
    found = looked_at(draft.kind, draft.config, Path(draft.model), facts)
    return draft.finding(*found.notices, *(f"error: {error}" for error in found.errors))


def _goes_on(config: RunConfig) -> bool:
    """Whether the run has a checkpoint to resume from, which has the models that are trained beside it."""
    ckpt = config.ckpt
    if ckpt is None or not ckpt.resumes:
        return False
    steps = CheckpointStore(RunDirectory(config.output_dir, ckpt.dir).checkpoints).steps()
    return ckpt.resume != "auto" or bool(steps)


def refused(check: Callable[[], object]) -> list[str]:
    """What a check refuses, as a line of the dry run; empty if nothing."""
    try:
        check()
    except UsageError as error:
        return [f"error: {error}"]
    return []


def sinks(draft: Draft) -> Draft:
    """Note what does not work at the moment, which stops no run, and as errors what can't work."""
    if not draft.config.sinks.are_on:
        return draft
    warnings, errors = problems_of_sinks(draft.config.sinks, draft.config.run_directory().path)
    return draft.having(notes=(*draft.notes, *warnings), errors=(*draft.errors, *errors))


def check_sinks(draft: Draft) -> Draft:
    """The same at a start.

    Raises:
        UsageError: settings of a sink can't work.
    """
    draft = sinks(draft)
    if draft.errors:
        raise UsageError("\n".join(draft.errors))
    return draft
