"""The weights of the policies that have sampled a run's answers, as far as they can be had."""

import contextlib
from collections.abc import Collection, Generator, Mapping
from pathlib import Path

from cairn.checkpoint.manifest import FILE_NAME, CheckpointError, load_manifest
from cairn.checkpoint.step_folder import StepFolder, verify
from cairn.checkpoint.store import CheckpointStore
from cairn.model.adapters import base_of_adapter, is_adapter
from cairn.run.errors import UsageError
from cairn.run.messages import PolicyName
from cairn.run.metrics import ranges_of
from cairn.run.output import Stage, no_progress
from cairn.tools.replay.again import taken_again
from cairn.tools.replay.comparison import compare_rows
from cairn.tools.replay.recorded import RecordedRun, StepRange
from cairn.tools.replay.sampled import is_same_policy


class KeptPolicies:
    """The policies of a run whose weights can be had."""

    def __init__(self, run: RecordedRun):
        """Nothing is read yet."""
        self._run = run
        self._attempt = run.run.attempt()

    def steps(self) -> list[int]:
        """The steps whose weights are there: the checkpoints, and 0 if the model is there that the run
        began with."""
        return [*([0] if self._beginning() else []), *self._run.saved]

    def find(self, policy: PolicyName) -> Path | None:
        """The folder of a policy's weights, or of its adapter; None: it is not there."""
        if policy.step == 0:
            return self._beginning() if self._is_ours(policy) else None
        if policy.step in self._run.saved:
            manifest = self._run.checkpoints.manifest(policy.step)
            if manifest.run_id == policy.run_id and is_same_policy(policy.branch, manifest.branch):
                return StepFolder(self._run.checkpoints.folder(policy.step)).model
        folder = self._resumed_from(policy)
        return StepFolder(folder).model if folder and (folder / FILE_NAME).is_file() else None

    def is_there(self, policy: PolicyName) -> bool:
        """Whether a policy's weights are there, or can be made."""
        return self.find(policy) is not None or self.can_be_made(policy) is not None

    def can_be_made(self, policy: PolicyName) -> StepRange | None:
        """The steps that give a policy's weights when they are taken again on batches that the run has kept;
        None: they can't be taken again."""
        run = self._run
        later = next((step for step in run.saved if step >= policy.step), None)
        branch = self._attempt.branch if self._attempt else ""
        if later is not None:
            branch = run.checkpoints.manifest(later).branch
        if (
            policy.step == 0
            or not run.trains_on_batches
            or not self._is_ours(policy)
            or policy.branch != branch
        ):
            return None
        try:
            stretch = run.stretch(policy.step - 1, policy.step)
            run.batches(stretch)
        except UsageError:
            return None
        return stretch

    def refuse_lost(self, policies: Collection[PolicyName], about: str) -> None:
        """See that the weights of all policies can be had.

        Args:
            about: whose policies they are, for the message.

        Raises:
            UsageError: of some they can't.
        """
        lost = [one for one in policies if not self.is_there(one)]
        if not lost:
            return
        names = ", ".join(sorted({f"step {one.step} ({one.branch})" for one in lost}))
        there = ranges_of(self.steps()) if self.steps() else "none"
        raise UsageError(
            f"{about}: the weights of the policy of {names}, which has sampled some of it, are gone; those "
            f"of step {there} are there. Give a rollout of these policies (most of step N are of the policy "
            "of step N-1), save each step (--ckpt.interval 1), or keep the batches, from which the weights "
            "are made again (--trainer.keep-batches-gb)"
        )

    @contextlib.contextmanager
    def weights(
        self, policies: Collection[PolicyName], work_dir: Path | None = None, stage: Stage = no_progress
    ) -> Generator[Mapping[PolicyName, Path]]:
        """Where the weights of each of the policies are, as long as the context lasts; all are verified.

        Raises:
            UsageError: of some they can't be had.
            CheckpointError: a checkpoint is damaged.
            ReplayFailed: the steps that give them can't be taken again.
        """
        found: dict[PolicyName, Path] = {}
        with contextlib.ExitStack() as stack:
            for policy in sorted(policies, key=lambda one: one.step):
                folder = self.find(policy)
                if folder is not None and (step := StepFolder.holding(folder)):
                    verify(step, on_bytes=stage(f"verifying {step.name}", load_manifest(step).nbytes))
                elif folder is None and (stretch := self.can_be_made(policy)):
                    folder = stack.enter_context(self._made(stretch, work_dir))
                assert folder is not None, "it is checked"
                found[policy] = folder
            yield found

    @contextlib.contextmanager
    def _made(self, stretch: StepRange, work_dir: Path | None) -> Generator[Path]:
        run = self._run
        settings = run.settings(stretch) | {"workers": run.world_size(stretch)}
        with taken_again(run, stretch, settings, work_dir) as again:
            rows = {row["step"]: row for row in again.metrics()}
            if differing := compare_rows(run.rows, rows, stretch.steps):
                raise UsageError(
                    f"the weights of step {stretch.last} can't be made again: {stretch} come out otherwise "
                    f"({differing[0]}); `ckpt replay {run.given} --step {stretch.last - 1}` says more"
                )
            yield StepFolder(CheckpointStore(again.checkpoints()).folder(stretch.last)).model

    def _is_ours(self, policy: PolicyName) -> bool:
        return self._attempt is None or policy.run_id == self._attempt.run_id

    def _resumed_from(self, policy: PolicyName) -> Path | None:
        """The step of which the newest attempt has the policy's weights, if it began with them."""
        attempt = self._attempt
        if (
            attempt is None
            or attempt.resume_from is None
            or attempt.version(attempt.start_step) != str(policy)
        ):
            return None
        return Path(attempt.resume_from)

    def _beginning(self) -> Path | None:
        """The folder of the model that the run began with, if it is one here."""
        name = (self._run.trainer().get("model") or {}).get("name")
        folder = Path(str(name))
        if (folder / FILE_NAME).is_file():
            folder = StepFolder(folder).model
        there = folder.is_dir() and any(folder.glob("*.safetensors")) and (folder / "config.json").is_file()
        return folder.absolute() if there else None


def whole_model(folder: Path, base: str | None) -> Path:
    """The folder that a server of a policy is started with: the policy's own, or the base of its adapter.

    Args:
        base: where that is said to be.

    Raises:
        UsageError: the base is not there.
    """
    if not is_adapter(folder):
        return folder
    try:
        if record := base_of_adapter(folder):
            return record.find(folder, base)
    except CheckpointError as error:
        raise UsageError(str(error)) from None
    raise UsageError(f"{folder}: is an adapter without a record of its base model")
