"""The output folder of `eval`: what was asked, results, answers, and the ledgers of what is not complete.

    evaluations.json                      the settings of each evaluation, by its name
    evals.jsonl                           a line for each result; of a policy and evaluation, the last counts
    ledgers/NAME_POLICY.sqlite            an evaluation that goes on
    MODEL/NAME/rollouts/step_N.parquet    its answers, as `rollouts` reads them

One name means the same settings for all policies of a folder, so that their results can be compared.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cairn.evaluate.policies import Policy
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.evaluation import Evaluated, Evaluation
from cairn.orchestrator.ledger.opening import remove
from cairn.orchestrator.rollout_log import KeptRollouts, rows_of
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.files import DamagedFile, make_folders, read_json, write_json
from cairn.run.messages import Attempt
from cairn.run.recipe import now


@dataclass(frozen=True)
class EvaluationsFile:
    """The content of evaluations.json. begun: the time, which a chat template may print."""

    begun: str
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])


class EvalFolder:
    """The output folder; only one process may use it at a time."""

    def __init__(self, path: Path):
        """Make the folder, and lock it.

        Raises:
            UsageError: it is a run's, another process uses it, it can't be made, or what it says of its
                evaluations can't be read.
        """
        self.path = path
        self._directory = RunDirectory(path)
        if self._directory.roles.exists():
            raise UsageError(f"--out {path}: is the directory of a run, to which only the run writes")
        try:
            make_folders(path)
            locked = self._directory.lock()
        except OSError as error:
            raise UsageError(f"--out {path}: can't be made, or written to ({error.strerror})") from None
        if not locked:
            raise UsageError(
                f"--out {path}: another eval is at work there; wait for it, or give another folder"
            )
        self.file = self._directory.evals.path
        """The file of results."""
        self._about = path / "evaluations.json"
        try:
            asked = read_json(self._about, EvaluationsFile)
        except DamagedFile as error:
            self.close()
            raise UsageError(
                f"--out {path}: {error}. It has the settings that the results there were made with. Give "
                f"another --out; or, if you ask for the same evaluations with the same settings, delete "
                f"{self._about}"
            ) from None
        self.asked = asked or EvaluationsFile(now())

    def close(self) -> None:
        """Let others use it."""
        self._directory.unlock()

    def agree(self, evaluations: Mapping[str, Mapping[str, Any]]) -> None:
        """Note the settings of evaluations.

        Raises:
            UsageError: the folder has results of one with other settings.
        """
        for name, settings in evaluations.items():
            earlier = self.asked.evaluations.get(name, settings)
            for key in (key for key in {**earlier, **settings} if earlier.get(key) != settings.get(key)):
                raise UsageError(
                    f"evaluation {name!r}: {key} = {settings.get(key)!r}, but --out {self.path} has results "
                    f"with {earlier.get(key)!r}: give another --out, or the evaluation another name"
                )
        known = {**self.asked.evaluations, **{name: dict(one) for name, one in evaluations.items()}}
        self.asked = EvaluationsFile(self.asked.begun, known)
        write_json(self._about, asdict(self.asked), durable=True)

    # Results

    def results(self) -> list[dict[str, Any]]:
        """The newest result of each policy and evaluation."""
        rows = self._directory.evals.rows()
        return list({(row.get("policy"), row.get("name")): row for row in rows}.values())

    def result(self, policy: Policy, name: str) -> dict[str, Any] | None:
        """The newest result of an evaluation of this policy, if there is any."""
        about = {"policy": policy.digest, "name": name}
        return next((row for row in self.results() if about.items() <= row.items()), None)

    def is_done(self, policy: Policy, name: str) -> bool:
        """Whether there is a result, and no answer has failed."""
        row = self.result(policy, name)
        return row is not None and "reward" in row and row.get("failed") == 0

    def ledger(self, policy: Policy, name: str) -> Path:
        """Where answers are recorded until all of them have a reward."""
        return self.path / "ledgers" / f"{name}_{policy.digest}.sqlite"

    def rollouts(self, policy: Policy, name: str) -> KeptRollouts:
        """The answers of an evaluation."""
        return KeptRollouts(self.path / policy.label / name / "rollouts")

    def keep(
        self, policy: Policy, evaluation: Evaluation, found: Evaluated, chat: ChatFormat
    ) -> dict[str, Any]:
        """Write the answers, then the result; the ledger goes unless answers have failed. Returns the row."""
        name = evaluation.config.name
        row = {"model": policy.given, "policy": policy.digest, **found.row}
        row |= {"run_id": policy.run_id, "branch": policy.branch}
        if found.groups:
            attempt = Attempt(
                str(policy.run_id or ""), 1, "eval", policy.step, None, str(policy.branch or "")
            )
            labels = [evaluation.config.environment.called]
            rows = rows_of(policy.step, found.groups, labels, chat, trained=False)
            kept = self.rollouts(policy, name)
            make_folders(kept.folder)
            kept.write(policy.step, rows, attempt, math.inf)
            kept.flush()
        self._directory.evals.append(row)
        self._directory.evals.make_durable()
        if self.is_done(policy, name):
            remove(self.ledger(policy, name))
        return row

    def rows(self, policies: Collection[Policy], names: Collection[str]) -> list[dict[str, Any]]:
        """The results of these policies in these evaluations, in their order, as far as there are any."""
        found = (self.result(policy, name) for policy in policies for name in names)
        return [row for row in found if row is not None]
