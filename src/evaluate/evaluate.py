"""What `eval` does after its configuration is read: evaluates policies, and goes on where it was ended."""

import asyncio
import json
import re
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError
from cairn.config.orchestrator import EvaluateConfig, OrchestratorConfig
from cairn.evaluate.policies import Policy
from cairn.evaluate.results import EvalFolder
from cairn.inference.pool.membership import PoolSettings
from cairn.inference.pool.server_pool import ServerPool
from cairn.inference.server import AddressUnusable, ServerFailed
from cairn.inference.servers import GivenServers, OwnServer, Servers
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.evaluation import Evaluation
from cairn.policy.errors import WeightsRefused
from cairn.run.errors import UsageError
from cairn.run.exits import EXIT_STOPPED, RoleFailed
from cairn.run.output import outlive_terminal, printable
from cairn.run.processes import allow_open_files
from cairn.run.recipe import (
    ORCHESTRATOR,
    code_in,
    is_within,
    prints_date,
    settings_of,
    template_arguments,
)
from cairn.run.signals import on_stop_signals
from cairn.run.tables import print_table

RESTARTS = 3
"""How often a server of its own that died is started again without a new result."""
TELL_EVERY = 10
"""Seconds between two lines about how far an evaluation is."""


@dataclass(frozen=True)
class EvalPlan:
    """What is to be evaluated.

    config: settled, with `eval` as it is asked, and the GPUs of a server that is started. policies: in their
    order. check: is called with a model's folder before a server is started for it; raises UsageError if it
    does not fit.
    """

    config: EvaluateConfig
    policies: Sequence[Policy]
    check: Callable[[Path], None]

    def tell(self, text: str) -> None:
        """Tell the user something, on standard error if the results go to standard output as JSON."""
        file = sys.stderr if self.config.as_json else sys.stdout
        print(printable(text), file=file, flush=True)


def evaluate(plan: EvalPlan) -> int:
    """`eval`: evaluate policies; returns the exit code.

    Raises:
        UsageError: something can't be evaluated like this; nothing was started.
        ServerUnavailable: no server answers at a given address.
        RoleFailed: the server that was started fails again and again.
    """
    config, policies = plan.config, plan.policies
    folder = EvalFolder(Path(config.out))
    evaluations: list[Evaluation] = []
    try:
        evaluations = [Evaluation(config, one) for one in config.eval]
        folder.agree({one.config.name: _settings(config, one) for one in evaluations})
        work = _Work(plan, folder, evaluations)
        allow_open_files()
        code = work.see_through()
    finally:
        for one in evaluations:
            one.environment.close()
        folder.close()
    rows = folder.rows(policies, [one.config.name for one in evaluations])
    if config.as_json:
        print(json.dumps(rows, indent=2))
    else:
        _print_results(rows)
    plan.tell(f"results: {folder.file}")
    for policy, name in {
        (one.label, each.name): (one, each.name) for one in policies for each in config.eval
    }.values():
        if (kept := folder.rollouts(policy, name)).steps():
            plan.tell(f"answers: uv run rollouts {kept.folder.parent}")
    return code


def _settings(config: OrchestratorConfig, evaluation: Evaluation) -> dict[str, Any]:
    """What the results of an evaluation depend on, beside the policy."""
    one = evaluation.config
    names = ("environment", "sampling", "tool_parser", "reasoning_parser")
    settings = settings_of(config.of_evaluation(one).model_dump(), ORCHESTRATOR)
    recipe = {name: value for name, value in settings.items() if is_within(name, names)}
    if not recipe["sampling.stop"]:  # which results of earlier versions do not say
        del recipe["sampling.stop"]
    about = {"problems": evaluation.count, "samples": one.samples, "right_from": one.right_from}
    about |= {"seed": config.seed, "identity": evaluation.environment.identity}
    return json.loads(json.dumps({**recipe, **code_in(recipe), **about}, default=str))


# The work


class _Work:
    """Evaluates what is not evaluated yet."""

    def __init__(
        self,
        plan: EvalPlan,
        folder: EvalFolder,
        evaluations: Sequence[Evaluation],
    ):
        self.plan = plan
        self.config = plan.config
        self.folder = folder
        self.evaluations = evaluations
        self.tell = plan.tell
        self.left_out: dict[str, str] = {}
        """Policies that could not be evaluated, by digest, and why."""
        self._loop = asyncio.Runner()
        self.cancel: Callable[[], object] | None = None
        """Ends what the event loop is doing."""

    def see_through(self) -> int:
        """Evaluate all; returns the exit code.

        Raises:
            ServerUnavailable: no server answers at a given address.
            RoleFailed: the server that was started fails again and again.
        """
        policies = self.plan.policies
        servers = self._servers()
        outlive_terminal()
        try:
            with on_stop_signals(self._interrupt, servers.kill_and_exit):
                self._evaluate(policies, servers)
        except KeyboardInterrupt:
            self.tell(f"stopped: {self._kept()}; the same command goes on there")
            return EXIT_STOPPED
        finally:
            self._loop.close()
            servers.close()
        for reason in self.left_out.values():
            self.tell(f"not evaluated: {reason}")
        rows = self.folder.rows(policies, [one.config.name for one in self.evaluations])
        wanted = len(policies) * len(self.evaluations)
        for row in (row for row in rows if row.get("failed")):
            self.tell(
                f"{row['model']}, {row['name']}: {row['failed']} answers have failed ({row.get('error')}); "
                "the same command tries them again"
            )
        return 0 if len(rows) == wanted and all("reward" in row for row in rows) else 1

    def _servers(self) -> Servers:
        config = self.config
        if not config.inference_url:
            return OwnServer(config.inference, self.folder.path, self.plan.check, self.tell)
        runs = {policy.run_id: policy.run for policy in self.plan.policies if policy.run is not None}
        ended = {run_id for run_id, run in runs.items() if not run.is_locked()}
        return GivenServers(config.inference_url, ended, "--inference-url", take=config.take_server)

    def _interrupt(self, name: str) -> None:
        self.tell(f"{name}: stopping; what is complete is kept. The same again stops at once")
        if self.cancel is None:
            raise KeyboardInterrupt
        self.cancel()

    def _kept(self) -> str:
        results = len(self.folder.results())
        ledgers = len(list((self.folder.path / "ledgers").glob("*.sqlite")))
        return f"{self.folder.path} has {results} results, and the answers so far of {ledgers} evaluations"

    def _due(self, policy: Policy) -> list[Evaluation]:
        if policy.digest in self.left_out:
            return []
        return [one for one in self.evaluations if not self.folder.is_done(policy, one.config.name)]

    def _evaluate(self, policies: Sequence[Policy], servers: Servers) -> None:
        for policy in policies:
            tries = 0
            while self._due(policy):
                try:
                    near = self.folder.path / "downloads"
                    with policy.local(near) as model, servers.serving(model) as urls:
                        self._run(self._evaluate_one(policy, model, urls, servers))
                    break
                except ServerFailed as error:
                    tries += 1
                    if tries > RESTARTS:
                        raise RoleFailed(str(error)) from None
                    self.tell(f"{str(error).partition(';')[0]}: it is started again")
                except AddressUnusable as error:
                    raise UsageError(str(error)) from None
                except (CheckpointError, WeightsRefused, FileNotFoundError) as error:
                    self.left_out[policy.digest] = f"{policy.given}: {error}"

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it in an event loop, until it ends or a signal ends it.

        Raises:
            KeyboardInterrupt: a signal did.
        """

        async def cancellable() -> None:
            loop, task = asyncio.get_running_loop(), asyncio.create_task(work)
            self.cancel = lambda: loop.call_soon_threadsafe(task.cancel)
            try:
                await task
            finally:
                self.cancel = None

        try:
            self._loop.run(cancellable())  # always the same loop, to which environments are bound
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    async def _evaluate_one(self, policy: Policy, model: Path, urls: Sequence[str], servers: Servers) -> None:
        config = self.config
        date = policy.recipe(model).get("date") or (self.folder.asked.begun if prints_date(model) else None)
        chat = ChatFormat(model, template_arguments({"date": date} if date else {}))
        settings = PoolSettings(timeout=config.request_timeout, retry_for=config.request_timeout)
        assert config.server_timeout is not None, "the configuration is settled"
        async with ServerPool(urls, settings) as pool:
            await pool.wait_ready(config.server_timeout)
            watching = asyncio.create_task(servers.watch())
            working = asyncio.create_task(self._ask(policy, model, pool, chat))
            try:
                done, _ = await asyncio.wait((watching, working), return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in (watching, working):
                    task.cancel()
                await asyncio.gather(watching, working, return_exceptions=True)

    async def _ask(self, policy: Policy, model: Path, pool: ServerPool, chat: ChatFormat) -> None:
        await pool.serve(str(model), str(policy.name))
        for one in self._due(policy):
            name = one.config.name
            progress = _Progress(f"{policy.given}, {name}", one.count, self.tell)
            telling = asyncio.create_task(progress.tell_again_and_again())
            try:
                ledger = self.folder.ledger(policy, name)
                found = await one.run(policy.name, ledger, chat, pool, progress.note)
            finally:
                telling.cancel()
            row = await asyncio.to_thread(self.folder.keep, policy, one, found, chat)
            what = f"reward {row['reward']:.4g}" if "reward" in row else str(row.get("error"))
            self.tell(f"{policy.given}, {name}: {what}, in {row['seconds']:.1f} s")


class _Progress:
    """Says from time to time how far an evaluation is."""

    def __init__(self, what: str, count: int, tell: Callable[[str], None]):
        self.what, self.count, self.tell = what, count, tell
        self.done = 0

    def note(self) -> None:
        """One more problem is complete."""
        self.done += 1

    async def tell_again_and_again(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(TELL_EVERY)
            self.tell(f"{self.what}: {self.done} of {self.count} problems")


# Output


def _print_results(rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        return
    chances = sorted(
        {key for row in rows for key in row if re.fullmatch(r"pass@\d+", key)}, key=lambda k: int(k[5:])
    )
    names = _names([row["model"] for row in rows])
    columns = [
        "model",
        "evaluation",
        "problems",
        "samples",
        "reward",
        *chances,
        "tokens",
        "truncated",
        "failed",
    ]

    def cells(row: dict[str, Any]) -> Iterator[object]:
        yield names[row["model"]]
        yield row["name"]
        yield row.get("problems", "")
        yield row.get("samples", "")
        for key in ("reward", *chances):
            yield _with_interval(row, key)
        yield f"{row['tokens']:.1f}" if "tokens" in row else ""
        yield f"{100 * row['truncated']:.0f} %" if "truncated" in row else ""
        yield row.get("failed", "")

    print_table(columns, [list(cells(row)) for row in rows])


def _names(models: Sequence[str]) -> dict[str, str]:
    """What a table calls each model: its path from the run's name on, or more if two have the same."""
    parts = {model: [part for part in Path(model).parts if part != "checkpoints"] for model in models}
    names: dict[str, str] = {}
    for model, path in parts.items():
        count = 2 if re.fullmatch(r"step_\d+", path[-1]) else 1
        while count < len(path) and any(
            path[-count:] == other[-count:] for key, other in parts.items() if key != model
        ):
            count += 1
        names[model] = str(Path(*path[-count:]))
    return names


def _with_interval(row: dict[str, Any], key: str) -> str:
    if key not in row:
        return ""
    interval = row.get(f"{key}_ci95")
    return f"{row[key]:.4g}" + ("" if interval is None else f" ± {interval:.2g}")
