"""How an attempt begins in the run directory, and where a role that starts in its middle goes on."""

import contextlib
import dataclasses
import logging
import secrets
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cairn.checkpoint import eval_metrics
from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.memory.memory_owners import free
from cairn.checkpoint.memory.memory_slots import MemoryRecord, start_in_memory
from cairn.checkpoint.step_folder import verify
from cairn.checkpoint.store import CheckpointStore
from cairn.config.kinds import KINDS, RunConfig
from cairn.launch.start import Start, StartDamaged, newest_attempt
from cairn.remote import Objects, RemoteStore
from cairn.run.batches import BadBatch
from cairn.run.changes import Settings
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.files import DamagedFile, make_folders, read_json, write_atomic, write_json
from cairn.run.locked_folder import lock
from cairn.run.messages import Attempt
from cairn.run.metrics import lost, ranges_of
from cairn.run.recipe import TRAINER

logger = logging.getLogger(__name__)


def begin(
    run: RunDirectory, config: RunConfig, start: Start, recipe: Mapping[str, Any], *, command: str
) -> Attempt:
    """Prepare the run directory for an attempt from `start`, and announce the attempt to the roles.

    The run's remote prefix is taken first, so that a run that is refused there has touched nothing, and later
    remote steps are left before later local ones. Those go to `abandoned/`. Later rows of metrics.jsonl are
    removed, and so are evaluations of policies that will be others now; messages between roles are deleted.
    The directory stays locked while this process lives. `recipe` is the content of recipe.json.

    Raises:
        UsageError: another process is running in the directory, or the remote prefix belongs to another run.
        RemoteError: the object store refuses or fails.
    """
    if config.ckpt and config.ckpt.dir:
        _make_folder(run.checkpoints, f"--ckpt.dir {config.ckpt.dir}")
    _make_folder(run.path, f"--output-dir {config.output_dir}")
    lock(run)
    run.mend()
    run.end_roles("failed", "")  # of a killed attempt, so that they aren't taken for ours
    earlier = run.attempt()
    own_step = 0 if start.is_fork else start.step
    rewinds = (start.store.latest() or 0) > own_step
    if own_step and start.manifest:
        run_id, branch = start.manifest.run_id, start.manifest.branch
    elif earlier and config.ckpt and config.ckpt.resume == "auto":  # killed before its first checkpoint
        run_id, branch = earlier.run_id, earlier.branch
    else:
        run_id, branch = secrets.token_hex(4), ""
    token = secrets.token_hex(8)
    number = reserve_number(config, run_id, token, newest_attempt(run, start.store) + 1)
    attempt = Attempt(
        run_id=run_id,
        number=number,
        command=command,
        branch=f"branch_{number}" if rewinds or not branch or recipe.get("prompts_again") else branch,
        start_step=start.step,
        resume_from=str(start.folder) if start.folder else None,
        publishes_first=KINDS[command].trainer(config).publishes_first,
        token=token,
    )
    claim(config, attempt, own_step)
    name = f"before_attempt_{number}"
    aside = start.store.set_aside_after(own_step, name)
    if aside:
        print(f"the checkpoints after step {own_step} are now in {aside}", flush=True)
    run.set_batches_aside(start.store.abandoned / name, attempt)
    # roles.json may have been damaged; then the checkpoint tells that it is the same run.
    goes_on = earlier.run_id == run_id if earlier else own_step > 0
    if not goes_on and earlier:
        run.history.path.unlink(missing_ok=True)
    elif not goes_on and run.history.path.exists():  # its run is unknown
        make_folders(start.store.abandoned / name)
        run.history.path.rename(start.store.abandoned / name / run.history.path.name)
    if goes_on:
        say_missing(run, own_step, earlier)
    program, *given = sys.argv
    argv = [command, *given] if Path(program).name == command else []  # else a Python program has begun it
    run.history.begin_attempt(number, run.last_active() if goes_on else None, argv)
    undone = run.metrics.keep_through(own_step)
    if run.evals.path.exists() or run.evaluations.exists():
        forgotten = run.forget_evaluations(attempt, _made_again_through(run, attempt, recipe))
        if forgotten and (start.store.root / eval_metrics.RATINGS).exists():
            eval_metrics.note(start.store.root, eval_metrics.ratings_of(run.evals.rows()))
    wanted = rewinds and start.named  # the user asked to go back
    if goes_on and not wanted:
        run.history.recompute(*undone)
    for change in recipe["trainer"].get("changes", []):
        if change["step"] == start.step:
            run.history.change(change)
    if not _same_recipe(run, recipe):
        run.rewinds.forget_after(attempt)
    run.versions.clear()
    free(run.memory)
    write_json(run.recipe, recipe, durable=True)
    write_atomic(run.config, (config.model_dump_json(indent=2) + "\n").encode(), durable=True)
    run.begin(attempt)
    return attempt


def restore_roles(config: RunConfig, start: Start, command: str) -> None:
    """Write roles.json of a complete run again if it is lost or damaged: the last step says whose it is.

    Raises:
        UsageError: another process is running in the directory.
    """
    run, manifest = config.run_directory(), start.manifest
    if manifest is None or run.attempt() is not None or start.is_fork:
        return
    lock(run)
    try:
        run.mend()
        number = newest_attempt(run, start.store)
        run.begin(
            Attempt(manifest.run_id, number, command, start.step, str(start.folder), branch=manifest.branch)
        )
        run.set_role("trainer", "done")
        print(f"{run.roles} was lost or damaged: it is written again", flush=True)
    finally:
        run.unlock()


def _made_again_through(run: RunDirectory, attempt: Attempt, recipe: Mapping[str, Any]) -> int:
    """The last step whose policy will be what it was: it is made from the same batches by the same recipe.

    recipe.json must still be that of the attempt before.
    """
    step = attempt.start_step
    if not _same_recipe(run, recipe):
        return step
    with contextlib.suppress(BadBatch, DamagedFile):
        while run.batch(attempt, step + 1) is not None:
            step += 1
    return step


def _same_recipe(run: RunDirectory, recipe: Mapping[str, Any]) -> bool:
    """Whether the trainer's part is that of the attempt before, whose recipe.json must still be there.

    What only one of them says is not compared: another version of Cairn may have written the earlier one.
    """
    before: dict[str, Any] = (read_json(run.recipe, dict[str, Any]) or {}).get("trainer", {})
    now: Mapping[str, Any] = recipe.get("trainer", {})
    if not before or Settings.of(before).changes(now.get("settings", {}), TRAINER, now.get("settings", {})):
        return False
    before, now = _inputs(before), _inputs(now)
    return all(before[name] == now[name] for name in before.keys() & now.keys())


def _inputs(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What determines the policies of a recipe beside its settings: not by which records it is measured."""
    left_out = ("settings", "free", "changes", "validations")
    found = {name: value for name, value in recipe.items() if name not in left_out}
    if found.get("data"):  # resumed runs say where their data begins, also if that is where it begins anyhow
        found["data"] = {"begins_at": 0, **found["data"]}
    return found


def newest_start(attempt: Attempt, store: CheckpointStore, *, pass_over: bool) -> Attempt:
    """The attempt as seen by a role that starts in the middle of it: from its newest good checkpoint.

    As in `choose_start`, tensor files are verified by those who load them.

    Args:
        pass_over: skip a damaged checkpoint and take an older one. The trainer can't: the batches that led to
            the damaged step are deleted.

    Raises:
        StartDamaged: the newest checkpoint is damaged, and `pass_over` is false.
    """
    for step in reversed(store.steps()):
        if step <= attempt.start_step:
            break
        folder = store.folder(step)
        try:
            manifest = verify(folder, tensors=False)
        except CheckpointError as error:
            if not pass_over:
                raise StartDamaged(folder, str(error)) from None
            logger.warning("passing over a damaged checkpoint: %s", error)
            continue
        if (manifest.run_id, manifest.branch) == (attempt.run_id, attempt.branch):
            return dataclasses.replace(attempt, start_step=step, resume_from=str(folder))
    return attempt


def newest_trainer_start(attempt: Attempt, store: CheckpointStore, run: RunDirectory) -> Attempt:
    """The attempt as seen by ranks that start in the middle of it: from the newest checkpoint, or from a step
    in memory that is newer.

    Not from one whose policy the orchestrator has not been told of.

    Raises:
        StartDamaged: the newest checkpoint is damaged.
    """

    def may_start(record: MemoryRecord) -> bool:
        told = max(run.versions.all_announced(attempt), default=0) >= record.step
        return told or "orchestrator" not in record.about["parts"]

    start = newest_start(attempt, store, pass_over=False)
    found = start_in_memory(run.memory, start, may_start)
    if found is not start:
        logger.info("the ranks go on from step %d, which is in memory", found.start_step)
    return found


def reserve_number(config: RunConfig, run_id: str, token: str, least: int) -> int:
    """The number of the attempt that begins: at least `least`, and no other attempt's, on whichever machine.

    Raises:
        UsageError: the remote prefix belongs to another run.
        RemoteError: the object store refuses or fails.
    """
    remote = _remote(config)
    return remote.reserve(run_id, token, least) if remote else least


def claim(config: RunConfig, attempt: Attempt, step: int) -> None:
    """Take the remote prefix for this attempt, so that no other run, and no older attempt, writes there.

    Only then are the steps after `step` uncommitted, which is the run's own step that the attempt starts
    from: they are the run's own, of a way that it has left, or of an attempt that has lost the prefix.

    Raises:
        UsageError: it belongs to another run, or to a newer attempt.
        RemoteError: the object store refuses or fails.
    """
    if remote := _remote(config):
        noted = {"number": attempt.number, "branch": attempt.branch, "command": attempt.command}
        remote.claim(attempt.run_id, attempt.owner, noted)
        name = f"after_step_{step}_{secrets.token_hex(4)}"
        if left := remote.set_aside_after(step, name):
            steps = ", ".join(map(str, left))
            print(f"the remote checkpoints {steps} are set aside: {remote}/abandoned/{name}", flush=True)


def _remote(config: RunConfig) -> RemoteStore | None:
    """The run's remote store, if it has one."""
    if config.ckpt is None or config.ckpt.remote is None:
        return None
    return RemoteStore(Objects(config.ckpt.remote))


def _make_folder(path: Path, setting: str) -> None:
    """Create a folder early that is written to only much later.

    Raises:
        UsageError: it can't be created or written to; the message names the setting.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UsageError(f"{setting}: {path} is not a writable folder ({error.strerror})") from None


def say_missing(run: RunDirectory, last: int, earlier: Attempt | None) -> None:
    """Say what the run's files lack of the steps up to `last`, if anything; a fork begins with a later one.

    Args:
        earlier: the attempt before.
    """
    rows = [row for row in run.metrics.rows() if row["step"] <= last]
    there = {row["step"] for row in rows}
    said: list[str] = []
    if missing := set(range(min(there, default=1), last + 1)).difference(there):
        said.append(f"{run.metrics.path.name} has no row of steps {ranges_of(missing)}")
    for name, steps in lost(rows, run.evals.rows()).items():
        said.append(f"{run.evals.path.name} lacks {name!r} of steps {ranges_of(steps)}")
    if earlier and run.history.newest_attempt() < earlier.number:
        newest = run.history.newest_attempt()
        said.append(
            f"{run.history.path.name} ends in attempt {newest} of {earlier.number}, so events are missing"
        )
    for what in said:
        print(f"warning: {what}: no copy was found, and ckpt audit will say so, too", flush=True)
