"""The steps of `eval`'s own: which policies, in what, and with which settings; nothing is evaluated here."""

import contextlib
import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, Manifest, load_manifest
from cairn.checkpoint.step_folder import StepFolder
from cairn.checkpoint.store import CheckpointStore
from cairn.config.environment import EvalConfig
from cairn.config.inference import InferenceConfig
from cairn.config.kinds import KINDS
from cairn.config.model import ModelConfig
from cairn.config.orchestrator import EvaluateConfig
from cairn.config.rl import RLConfig
from cairn.evaluate.policies import Policy
from cairn.launch.plan.model import described, is_step, resolve_model
from cairn.launch.plan.run_plan import Draft
from cairn.orchestrator.completion.answers import check_parsers
from cairn.orchestrator.environments import BadEnvironment, EnvironmentFailed, check_environment
from cairn.remote import RemoteStore
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.files import DamagedFile
from cairn.run.object_store import is_url
from cairn.run.output import printable
from cairn.tools.ckpt_places import split, store_in

OF_RUN = (
    "seed", "sampling", "tool_parser", "reasoning_parser", "eval", "reward_threads", "reward_timeout",
    "reward_retries", "reward_retry_seconds",
)  # fmt: skip
"""Settings that are as in the run, if they are not given."""
OF_SERVER = ("dtype", "head", "max_model_len", "max_num_seqs", "threads", "tensor_parallel", "compile")
"""Settings of the server, likewise; the rest depends on what else the machine does."""
NOTHING_ASKED = (
    "eval needs something to evaluate in: --env.name ENVIRONMENT, or [[eval]] tables in a file "
    "(eval @ file.toml); those of the run count if the first model is a step of an RL run"
)
Find = Callable[[ModelConfig], str | Path | None]
"""Finds the folder of a model; None if only converting its weights finds out where that is."""


def as_in_run(draft: Draft) -> Draft:
    """With the settings of the run that the first policy is of, where none are given."""
    if not draft.policies:  # in a dry run, which may not look where they are
        return draft
    config, policy = draft.config, draft.policies[0]
    run = _config_of_run(policy)
    if run is None:
        return draft
    given = config.model_fields_set
    update: dict[str, Any] = {name: getattr(run.orchestrator, name) for name in OF_RUN if name not in given}
    if "sampling" in given:
        update["sampling"] = _over(run.orchestrator.sampling, config.sampling)
    server = _server_of(run)
    update["inference"] = config.inference.model_copy(
        update={name: server[name] for name in OF_SERVER if name not in config.inference.model_fields_set}
    )
    assert policy.run is not None
    words = printable(f"what is not given is as in {policy.run.config}")
    print(words, file=sys.stderr if config.as_json else sys.stdout, flush=True)
    return draft.having(config=config.model_copy(update=update))


def _config_of_run(policy: Policy) -> RLConfig | None:
    """The configuration of the RL run that the policy is of, if its directory is here."""
    attempt = policy.run.attempt() if policy.run else None
    if policy.run is None or attempt is None or KINDS.get(attempt.command) is not KINDS["rl"]:
        return None
    try:
        return policy.run.read_config(RLConfig, of_any_version=True)
    except DamagedFile as error:
        raise UsageError(f"{policy.given}: the settings of its run are not known: {error}") from None


def _server_of(run: RLConfig) -> dict[str, Any]:
    """The settings of a server that computes as that of a run does."""
    return {name: getattr(run.inference, name) for name in OF_SERVER}


def policy_to_serve(name: str) -> tuple[Policy, InferenceConfig]:
    """The policy that `cairn chat` calls by a name, and the settings of a server: those of its run, if any.

    Raises:
        UsageError: there is no such model or step.
    """
    try:
        policy = next(_policy("cairn chat", name, ModelConfig(), resolve_model))
    except UsageError as error:
        raise UsageError(str(error).replace("--model.name", "cairn chat", 1)) from None
    run = _config_of_run(policy)
    return policy, InferenceConfig().model_copy(update={} if run is None else _server_of(run))


def _over(section: Any, given: Any) -> Any:
    """A section of settings, with what is given in another in place of its own."""
    return section.model_copy(update={name: getattr(given, name) for name in given.model_fields_set})


def evaluations(draft: Draft) -> Draft:
    """With what to evaluate in.

    Raises:
        UsageError: nothing is given, or a setting for all evaluations does not fit one of them.
    """
    config = draft.config
    asked = config.eval
    if config.env is not None:
        name = re.sub(r"[^A-Za-z0-9_.-]", ".", config.env.called).strip("._-")[-64:].lstrip("._-")
        asked = [EvalConfig(name=name or "environment", environment=config.env)]
    if not asked:
        raise UsageError(NOTHING_ASKED)
    given = {name: getattr(config, name) for name in ("problems", "samples")}
    found: list[EvalConfig] = []
    for one in asked:
        values = one.model_dump() | {name: value for name, value in given.items() if value is not None}
        if config.temperature is not None:
            values["sampling"] = values["sampling"] | {"temperature": config.temperature}
        try:
            found.append(EvalConfig.model_validate(values))
        except ValueError as error:
            problems = getattr(error, "errors", list)()
            why = problems[0]["msg"].removeprefix("Value error, ") if problems else str(error)
            raise UsageError(f"evaluation {one.name!r}: {why}") from None
    # A file of the orchestrator's names the directory of a run, which may be going on.
    return draft.having(config=config.model_copy(update={"eval": found, "output_dir": config.out}))


def evaluations_if_any(draft: Draft) -> Draft:
    """The same in a dry run, which may show the defaults of everything."""
    if not draft.config.eval and draft.config.env is None:
        return draft if draft.missing else draft.having(missing=NOTHING_ASKED)
    return evaluations(draft)


def check_evaluations(draft: Draft) -> Draft:
    """Check that parsers and environments work.

    Raises:
        UsageError: one does not.
    """
    check_parsers(draft.config)
    for one in draft.config.eval:
        try:
            check_environment(draft.config.of_evaluation(one))
        except (BadEnvironment, EnvironmentFailed) as error:
            raise UsageError(f"evaluation {one.name!r}: {error}") from None
    return draft


def require_models(config: EvaluateConfig) -> None:
    """Check that some model is named.

    Raises:
        UsageError: none is.
    """
    if not config.model.name and not config.models and config.all is None:
        raise UsageError(
            "eval needs a model: --model.name with a step's folder, RUN_DIR, a Hugging Face folder or a "
            "name on the hub; --models for several; or --all RUN_DIR for all steps of a run"
        )


def find_policies(draft: Draft) -> Draft:
    """With the policies that the settings name, in their order; models on the hub are fetched.

    Raises:
        UsageError: there is no such model or step.
    """
    return draft.having(policies=_policies_of(draft.config, resolve_model))


def find_policies_here(draft: Draft) -> Draft:
    """The same in a dry run: of models the weights are neither fetched nor converted.

    Raises:
        UsageError: there is no such model or step.
    """
    config = draft.config
    if any(is_url(name) for name in (config.model.name, *config.models, config.all or "")):
        return draft.leaving_out("the steps in an object store")
    return draft.having(policies=_policies_of(config, described))


def _policies_of(config: EvaluateConfig, find: Find) -> tuple[Policy, ...]:
    named = [("--model.name", config.model.name)] if config.model.name else []
    named += [("--models", name) for name in config.models]
    found = [policy for flag, name in named for policy in _policy(flag, name, config.model, find)]
    if config.all is not None:
        found += _all_of(config.all)
    return tuple({policy.digest: policy for policy in found}.values())


def _policy(flag: str, name: str, model: ModelConfig, find: Find) -> Iterator[Policy]:
    with _about(flag, name):
        if is_url(name):
            remote, step = split(name)
            steps = remote.steps()
            if not steps:
                raise UsageError(f"{flag} {name}: there are no checkpoints")
            yield _remote(name, remote, steps[-1] if step is None else step)
            return
        path = Path(name)
        if _is_run(path):
            newest, damaged = store_in(path).newest_good(content=False)
            if newest is None:
                raise UsageError(f"{flag} {name}: no step is whole: {'; '.join(damaged)}")
            yield _step(str(newest), newest)
        elif path.is_dir() and is_step(path):
            yield _step(name, path)
        elif path.is_dir() and (step := StepFolder.holding(path.absolute())):
            yield _step(name, step)
        elif folder := find(model.model_copy(update={"name": name})):
            yield _other(name, Path(folder))


def _all_of(name: str) -> list[Policy]:
    with _about("--all", name):
        if is_url(name):
            remote, step = split(name)
            if step is not None:
                raise UsageError(f"--all {name}: is a single step; give the URL of the run, {remote}")
            found = [_remote(f"{remote}/step_{number}", remote, number) for number in remote.steps()]
        else:
            if not Path(name).is_dir():
                raise UsageError(f"--all {name}: there is no such folder; give a run directory")
            store = store_in(Path(name))
            folders = [store.folder(number) for number in store.steps()]
            found = [_step(str(folder), folder) for folder in folders]
    if not found:
        raise UsageError(f"--all {name}: there are no checkpoints")
    return found


@contextlib.contextmanager
def _about(flag: str, name: str) -> Iterator[None]:
    """Name the flag in errors of checkpoints."""
    try:
        yield
    except CheckpointError as error:
        raise UsageError(f"{flag} {name}: {error}") from None


def _is_run(path: Path) -> bool:
    """Whether `path` is a run directory, or the folder of its checkpoints, and no model by itself."""
    if not path.is_dir() or is_step(path):
        return False
    if _is_of_run(path):
        return True
    is_model = (path / "config.json").is_file()
    stores = CheckpointStore(path / "checkpoints"), CheckpointStore(path)
    return not is_model and any(store.steps() for store in stores)


def _is_of_run(path: Path) -> bool:
    return RunDirectory(path).roles.is_file()


def _step(given: str, folder: Path) -> Policy:
    folder = folder.absolute()
    manifest = load_manifest(folder)
    run = next((RunDirectory(path) for path in folder.parents[:2] if _is_of_run(path)), None)
    return _of_run(given, manifest, folder, run)


def _remote(given: str, remote: RemoteStore, step: int) -> Policy:
    return _of_run(given, remote.manifest(step), remote, None)


def _of_run(given: str, manifest: Manifest, source: Path | RemoteStore, run: RunDirectory | None) -> Policy:
    digest = hashlib.blake2b(manifest.to_json(), digest_size=8).hexdigest()
    label = "-".join(filter(None, (run.path.name if run else "run", manifest.run_id, manifest.branch)))
    return Policy(given, manifest.step, manifest.run_id, manifest.branch, digest, label, source, run)


def _other(given: str, folder: Path) -> Policy:
    """A model that is no step: identified by the names, sizes and times of its files."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns} ".encode())
    name = Path(given).absolute().name if Path(given).exists() else given.replace("/", "-")
    return Policy(given, 0, None, None, digest.hexdigest(), f"{name}-{digest.hexdigest()[:8]}", folder)
