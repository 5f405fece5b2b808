"""A run, live or finished, read from its directory."""

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.checkpoint.manifest import FILE_NAME, Manifest, load_manifest
from cairn.checkpoint.store import CheckpointStore
from cairn.run.directory import NO_RUN
from cairn.run.errors import UsageError
from cairn.run.object_store import is_url
from cairn.run.view import RunSnapshot, RunView, State
from cairn.watch.evaluations import Flips, flips_of
from cairn.watch.goodput import TimeAccount, TokenAccount, time_account, tokens_of
from cairn.watch.overview import Overview, overview

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedTokenizerBase

    from cairn.api.reading import Checkpoint

COLUMNS = (
    *("step", "place", "problem", "sample", "environment", "prompt", "text", "reward", "parts", "failed"),
    *("finish_reason", "tokens", "seconds", "policy_step"),
)
"""Columns of the data frame of rollouts."""


@dataclass(frozen=True)
class Step:
    """A checkpoint that exists, and what its manifest says."""

    number: int
    folder: Path

    @functools.cached_property
    def manifest(self) -> Manifest:
        """The whole manifest.

        Raises:
            cairn.CairnError: it is damaged, or the step has been deleted.
        """
        return load_manifest(self.folder)

    @property
    def metrics(self) -> dict[str, Any]:
        """The step's row of metrics.jsonl."""
        return self.manifest.metrics

    @property
    def created(self) -> str:
        """Time of the commit: UTC, ISO 8601."""
        return self.manifest.created

    @property
    def nbytes(self) -> int:
        """Size of all files in bytes."""
        return self.manifest.nbytes

    @property
    def model(self) -> Path:
        """Hugging Face directory with the weights."""
        return self.folder / "model"

    def load(self) -> "Checkpoint":
        """The step, opened with `cairn.load_checkpoint`."""
        from cairn.api.reading import load_checkpoint

        return load_checkpoint(self.folder)


class Run:
    """A run directory. Every property reads the files anew, so it also works while the run is going on.

    Args:
        path: the run's `--output-dir`; or the URL that it has as `--ckpt.remote`: then metrics, evaluations,
            accounts and overview are those of the newest upload when this was made; the rest is not there.

    Raises:
        cairn.UsageError: it is not a run directory.
    """

    def __init__(self, path: str | Path):
        self._url = str(path) if is_url(str(path)) else None
        if self._url is None:
            self._view = RunView(path)
        else:
            from cairn.remote.remote_runs import RemoteRun

            self._copy = tempfile.TemporaryDirectory(prefix="cairn-run-")  # removed with this object
            remote = RemoteRun(self._url, Path(self._copy.name))
            remote.refresh()
            self._view = remote.view()
        self.path = self._view.run.path
        if not self._view.run.exists():
            where = f"{path}: {NO_RUN}"
            if (self.path / FILE_NAME).exists():
                where += f"; it is a checkpoint, which cairn.load_checkpoint({str(path)!r}) reads"
            raise UsageError(where)

    def __repr__(self) -> str:
        return f"<cairn.Run {str(self.path)!r}: {self.state}, step {self.step}>"

    def snapshot(self) -> RunSnapshot:
        """The state of the run at this moment: roles, heartbeats, events, costs and more."""
        return self._view.snapshot()

    def overview(self) -> Overview:
        """What `watch` shows: step, pace, time left, curves, roles, newest checkpoint, and `findings`.

        `findings` is what `diagnose` says, each with `what` is wrong and `advice`.
        """
        return overview(self._view)

    def time_account(self) -> TimeAccount:
        """What became of every second of the run: `seconds` by kind, `idle` ones, and `ettr`."""
        return time_account(self._view.metrics(), self._view.history(), self._view.costs())

    def token_account(self) -> TokenAccount:
        """What became of every token of the run: `tokens` by fate, `total`, and `share` of each fate."""
        return tokens_of(self._view)

    @property
    def state(self) -> State:
        """running, stopping, done, stopped, failed, killed or empty; see `RunSnapshot.state`."""
        return self.snapshot().state

    @property
    def step(self) -> int:
        """The newest finished optimiser step."""
        return self.snapshot().step

    @property
    def metrics(self) -> "pd.DataFrame":
        """metrics.jsonl: one row per step, indexed by `step`, with one column per metric."""
        import pandas as pd

        frame = pd.DataFrame(list(self._view.metrics()))
        return frame.set_index("step") if len(frame) else pd.DataFrame(index=pd.Index([], name="step"))

    @property
    def evals(self) -> "pd.DataFrame":
        """evals.jsonl: one row per evaluation or validation: `step`, `name`, `reward` or `loss`, and more."""
        import pandas as pd

        return pd.DataFrame(self._view.evals())

    def flips(self, name: str, before: int, after: int) -> Flips:
        """What has changed in the evaluation `name` from the policy of step `before` to that of `after`.

        Raises:
            cairn.UsageError: the answers of one of them are not kept.
            cairn.CairnError: a file of answers is damaged.
        """
        return flips_of(self._view.run, self._view.known_config(), name, before, after)

    @property
    def steps(self) -> list[Step]:
        """The checkpoints that exist, oldest first."""
        self._only_here("checkpoints", f"download one with `uv run ckpt copy {self._url}/step_N FOLDER`")
        store = CheckpointStore(self._view.checkpoints())
        return [Step(number, store.folder(number)) for number in store.steps()]

    def rollouts(self, *, turns: bool = False) -> "pd.DataFrame":
        """The rollouts that were shipped for training and those that wait, one per row (RL only).

        Shipped ones are read from `rollouts/`, whose oldest files are deleted by
        `orchestrator.keep_rollouts_gb`; where these are missing, from the ledger, which keeps them until a
        checkpoint has the training on them.

        Args:
            turns: add a column with each rollout's turns: texts, tokens, logprobs and policy versions.

        Returns:
            The columns `step`, the optimiser step that the rollout was shipped for (missing while it waits);
            `place` in the prompt order; `problem` number in the environment; `sample`, its number among the
            answers to this prompt; `environment`; `prompt`, the text with the chat template, None if the
            tokenizer is gone; `text`; `reward`, missing until it is known; `parts` of the reward by name;
            `failed`, the reason if there will be no reward; `finish_reason`, stop or length; `tokens`, the
            number of sampled ones; `seconds` from its begin to its reward, if one process saw both;
            `policy_step`, the newest policy when the prompt was issued.

        Raises:
            cairn.UsageError: the run has neither rollouts nor a ledger, as in SFT.
            cairn.CairnError: the ledger or a file of rollouts is damaged.
        """
        self._only_here("rollouts", "they stay on the disk of the run")
        import pandas as pd

        from cairn.orchestrator.ledger import read_answers
        from cairn.orchestrator.rollout_log import KeptRollouts

        run = self._view.run
        kept, columns = KeptRollouts(run.rollouts), [*COLUMNS, *(["turns"] if turns else [])]
        # The ledger first: what is shipped meanwhile is then seen twice, and not missed.
        waiting = read_answers(run.ledger) if run.ledger.exists() else []
        rows = [row for step in kept.steps() for row in kept.read(step, columns)]
        if not rows and not run.ledger.exists():
            raise UsageError(f"{self.path}: there is no ledger of rollouts; only RL runs have one")
        seen = {(row["place"], row["sample"]) for row in rows}
        waiting = [row for row in waiting if (row["place"], row["sample"]) not in seen]
        tokenizer = self._tokenizer() if waiting else None
        for row in waiting:
            ids = json.loads(row.pop("prompt_ids") or "[]")
            row["prompt"] = tokenizer.decode(ids) if tokenizer and ids else None
        types = {"step": "Int64", "reward": "float64", "seconds": "float64"}
        return pd.DataFrame([*rows, *waiting], columns=columns).astype(types)

    def tokens(self, step: int) -> "pd.DataFrame":
        """Every sampled token of a step's rollouts, with what trainer and server say of it (RL only).

        Both are kept for a while: rollouts as `orchestrator.keep_rollouts_gb` says, what the trainer computed
        as `trainer.keep_tokens_gb` says.

        Returns:
            One token a row: `place`, `sample`, `problem` and `turn` of the rollout; `position` in the turn;
            `token_id`; `policy_step`, of the policy that sampled it; `sampler_logprob`, the server's; and of
            tokens that were learned from, `logprob`, the trainer's under the weights at the token's first
            update in the step, `gap`, the latter minus the former, `ratio`, exp(gap), and `entropy` in nats
            where the loss computes it; `learned`, whether it was.

        Raises:
            cairn.UsageError: no rollouts of the step are kept.
            cairn.CairnError: a file is damaged.
        """
        self._only_here("rollouts", "they stay on the disk of the run")
        import pandas as pd

        from cairn.orchestrator.rollout_log import KeptRollouts
        from cairn.run.trained_tokens import TrainedTokens
        from cairn.watch.trained_tokens import token_columns

        run = self._view.run
        columns = token_columns(KeptRollouts(run.rollouts), TrainedTokens(run.tokens), step)
        if not columns:
            raise UsageError(f"{self.path}: no rollouts of step {step} are kept")
        return pd.DataFrame(columns).astype({"policy_step": "Int64"})

    def _only_here(self, what: str, remedy: str) -> None:
        """Refuse what can be read of a run directory only."""
        if self._url is not None:
            raise UsageError(f"{self._url}: {what} are not read from an object store; {remedy}")

    def _tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """The tokenizer of the newest checkpoint, or of the model that the run started from; None if gone."""
        from transformers import AutoTokenizer

        model = (self.snapshot().config or {}).get("model") or {}
        for folder in [*(step.model for step in reversed(self.steps)), Path(str(model.get("name")))]:
            if folder.is_dir():
                try:
                    return AutoTokenizer.from_pretrained(folder)
                except (OSError, ValueError):
                    continue
        return None
