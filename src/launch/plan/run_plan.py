"""The plan of a command: all that is decided before anything starts, made by one table of steps.

`make` goes through the table (`steps.py`) in its order. Each step takes a `Draft` and gives another one; what
comes out at the end is the `RunPlan`, after which nothing rewrites settings. `--dry-run` goes through the
same table: it takes a step's `dry` function where there is one, and leaves out what may touch disk or
network.
"""

import contextlib
import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cairn.config.kinds import KINDS, RunKind
from cairn.evaluate.policies import Policy
from cairn.inference.vllm_command import Build
from cairn.launch.memory import CountedModels
from cairn.launch.plan.environments import Checked
from cairn.launch.plan.gpu_assignment import Placing
from cairn.launch.plan.settings import Choice
from cairn.launch.start import Start, StartDamaged
from cairn.launch.supervise.slot import EarlyProcess
from cairn.run.errors import CairnError
from cairn.run.machine import Machine
from cairn.run.messages import Attempt

ALWAYS = ("config", "machine")
"""What every step may read without saying so: it is there from the beginning, if only as it was given."""


@dataclass(frozen=True)
class Draft:
    """A plan in the making.

    What a step gives is a field here, by name; `known` says which of them have been given. Those that are
    not have the value that stands for "nothing of that kind", such as no start or no servers.

    command: as on the command line. given: the settings as the user gave them. config: as the steps have
    made them so far. settled: once no setting is open, and before folders take the place of models' names.
    notes: lines for the user, printed when nothing refuses the command any more. found, errors: in a dry
    run, what steps have found, and why a start would be refused. left_out: what a dry run did not look at.
    missing: in a dry run, the settings without which only defaults can be shown.
    """

    command: str
    given: Any
    config: Any
    known: frozenset[str] = frozenset()
    settled: Any = None
    notes: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    missing: str | None = None
    checked: Checked | None = None
    """What the environments ask, and the orchestrator's part of the recipe."""
    away: Path | None = None
    """The folder of the newest step, if its tensors are in the object store only."""
    damaged: StartDamaged | None = None
    """The checkpoint that ranks could not load, in a plan that is made again."""
    start: Start | None = None
    """What the run starts from; None for commands that train nothing."""
    complete: str | None = None
    """Why there is nothing left to do, in words."""
    machine: Machine = field(default_factory=Machine)
    vllm: Build = "gpu"
    """The build of vLLM for a server that the command starts."""
    gpu_servers: bool = False
    """Whether vLLM serves on GPUs here."""
    taken: Mapping[str, str] = field(default_factory=dict[str, str])
    """The GPUs of given servers, by UUID, each with the server's address."""
    placing: Placing | None = None
    cluster: Machine | None = None
    """The Ray cluster that the user has given."""
    choices: tuple[Choice, ...] = ()
    roles: tuple[str, ...] = ()
    """Those that are started."""
    recipe: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The content of recipe.json."""
    model: str = ""
    """The policy's Hugging Face directory; in a dry run perhaps without weights."""
    counted: CountedModels | None = None
    """The trainer's models, where GPUs of this machine train them."""
    attempt: Attempt | None = None
    """The trainer's, which a separate orchestrator joins."""
    policies: tuple[Policy, ...] = ()
    """Those to evaluate."""
    early: EarlyProcess | None = None
    """The trainer's driver, in a run with a Ray cluster of its own."""

    @property
    def dry(self) -> bool:
        """Whether nothing will be started."""
        return self.given.dry_run

    @property
    def first(self) -> Start:
        """The start, which a step has given."""
        assert self.start is not None
        return self.start

    @property
    def kind(self) -> RunKind:
        """The kind of the run; a separate orchestrator is part of one whose trainer is started on its own."""
        return KINDS["trainer" if self.command == "orchestrator" else self.command]

    @property
    def trainer(self) -> Any:
        """The trainer's settings."""
        return self.kind.trainer(self.config)

    @property
    def own_server(self) -> bool:
        """Whether the command starts an inference server, whose address is then in `config`, too."""
        if self.command in KINDS:
            return "inference" in self.kind.roles and not self.given.orchestrator.inference_url
        return self.command == "inference" or (self.command == "eval" and not self.given.inference_url)

    @property
    def ranks(self) -> Machine:
        """The machine as the trainer's ranks see it, with their GPUs."""
        if self.cluster is not None:
            return self.cluster
        return self.placing.of_ranks(self.machine) if self.placing else self.machine

    def having(self, **values: Any) -> "Draft":
        """This draft with other values."""
        return dataclasses.replace(self, **values)

    def finding(self, *lines: str) -> "Draft":
        """With further lines for the user of a dry run."""
        return self.having(found=(*self.found, *lines))

    def leaving_out(self, what: str) -> "Draft":
        """With something more that a dry run does not look at."""
        return self.having(left_out=(*self.left_out, what))


class RunPlan(Draft):
    """A finished draft: what a command is going to do. Nothing changes it any more.

    Roles get their part of `config`. Another plan can be made from this one (`again`).
    """


def always(_draft: Draft) -> bool:
    """For steps that every run of their commands goes through."""
    return True


@dataclass(frozen=True)
class PlanStep:
    """One row of the table.

    name: of what is decided. work: gives the draft with `gives`; raises CairnError to refuse the command.
    commands: those whose plan has the step. needs: fields of `Draft` that earlier steps have given; beside
    them every step reads `ALWAYS`. gives: the fields that it changes. touches: "disk" if it may write there,
    "network" if it may ask other machines. prints: what it tells the user at once; empty if nothing. when:
    whether there is anything to decide. dry: what a dry run does instead; without it, a step that touches
    anything is left out of a dry run, which says so by the step's name.
    """

    name: str
    work: Callable[[Draft], Draft]
    commands: frozenset[str]
    needs: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    touches: tuple[str, ...] = ()
    prints: str = ""
    when: Callable[[Draft], bool] = always
    dry: Callable[[Draft], Draft] | None = None


def make(command: str, config: Any, table: Sequence[PlanStep]) -> RunPlan:
    """The plan of a command.

    Args:
        config: the settings as the user gave them.
        table: in which each step comes after those that give what it needs.

    Raises:
        CairnError: the command can't start like this; nothing of the run was touched, and
            nothing that was started early goes on.
    """
    return _through(Draft(command, config, config), table)


def again(plan: RunPlan, forgotten: str, table: Sequence[PlanStep], **values: Any) -> RunPlan:
    """Another plan, made from an old one of which something no longer holds.

    Only the steps that give it, and those which need what these give, are gone through again.

    Args:
        forgotten: the field that no longer holds, such as `start`.
        values: fields with which the steps begin.

    Raises:
        CairnError: the command can't go on like this.
    """
    forget = {forgotten}
    steps = [step for step in table if plan.command in step.commands]
    for step in steps:
        if forget.intersection(step.needs):
            forget.update(step.gives)
    forget -= {"config", "notes"}  # others have given these as well
    draft = plan.having(known=plan.known - forget, notes=(), **values)
    repeated = [step for step in steps if forget.intersection((*step.needs, *step.gives))]
    return _through(draft, repeated)


def _through(draft: Draft, table: Sequence[PlanStep]) -> RunPlan:
    """Take the draft through the steps of its command; a step that finds the run complete ends that."""
    try:
        for step in table:
            if draft.command in step.commands and (draft.dry or not draft.complete):
                draft = (_dry if draft.dry else _taken)(step, draft)
    except BaseException:
        if draft.early is not None:
            draft.early.close()
        raise
    return RunPlan(**vars(draft))


def _taken(step: PlanStep, draft: Draft) -> Draft:
    assert draft.known.issuperset(step.needs), f"{step.name} comes too early in the table"
    if step.when(draft):
        draft = step.work(draft)
    return draft.having(known=draft.known.union(step.gives))


def _dry(step: PlanStep, draft: Draft) -> Draft:
    """A step in a dry run: a refusal is found, and the next steps are looked at all the same.

    Raises:
        CairnError: the step would have changed the settings that are to be shown.
    """
    if not step.when(draft):
        return draft.having(known=draft.known.union(step.gives))
    if step.dry is None and step.touches:
        return draft.leaving_out(step.name)
    if step.dry is None and not draft.known.issuperset(step.needs):
        return draft
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):  # on which the settings are printed, and nothing else
            draft = (step.dry or step.work)(draft)
        draft = draft.having(known=draft.known.union(step.gives))
    except CairnError as error:
        if draft.settled is None and "config" in step.gives:
            raise
        draft = draft.having(errors=(*draft.errors, str(error)))
    return draft.finding(*said.getvalue().splitlines())


def untouched(draft: Draft) -> Draft:
    """For a step that has nothing to find out in a dry run, and leaves nothing out."""
    return draft
