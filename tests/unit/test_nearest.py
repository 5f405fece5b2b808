"""Where a run with an object store resumes from: the nearest good step, wherever it is."""

import json
import shutil
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import flip
from safetensors.torch import save
from stores import make_step

from cairn.checkpoint.manifest import Manifest, load_manifest
from cairn.checkpoint.step_folder import verify
from cairn.checkpoint.store import PINS, CheckpointStore
from cairn.checkpoint.tensors.remote_ranges import away_in_step
from cairn.config.ckpt import CkptConfig
from cairn.config.trainer import SFTConfig
from cairn.launch.attempt import begin
from cairn.launch.plan import remote_start as launch_remote
from cairn.launch.plan.remote_start import replaced, with_remote
from cairn.launch.start import Start, StartDamaged, choose_start
from cairn.remote import Objects, RemoteStore
from cairn.remote.client.upload_body import Sent
from cairn.remote.prefix_lease import Taken
from cairn.run.errors import CairnError, UsageError
from cairn.run.object_store import NoCredentials

SFT = ("trainer",)
RL = ("trainer", "orchestrator")
OPTIMIZER = "trainer/optimizer.safetensors"


def evaluation(step: int) -> str:
    """A line of evals.jsonl."""
    about = {"run_id": "run", "branch": "branch_1", "step": step, "name": "a"}
    return json.dumps({**about, "reward": 0.5}) + "\n"


def step_in(root: Path, step: int) -> tuple[Path, Manifest]:
    """A step with the parts that a run of RL needs."""
    values = {"large": torch.full((500, 100), float(step))}
    files = {
        "model/model.safetensors": save(values),
        OPTIMIZER: save(values),
        "trainer/state.json": b'{"seed": 0, "progress": {"step": 1}}',
        "orchestrator/state.json": b"{}",
    }
    return make_step(root, step, files, parts=["trainer", "orchestrator"])


class Tiers:
    """A remote store with two steps of a run, and a run directory."""

    def __init__(self, folder: Path):
        self.there = folder / "remote"
        self.url = f"file://{self.there}"
        self.run = folder / "run"
        self.store = CheckpointStore(self.run / "checkpoints")
        self.remote = RemoteStore(Objects(self.url))
        self.remote.claim("run", "run:1")
        self.remote.objects.put(f"run/{PINS}", b"[4]")
        self.remote.objects.put("run/evals.jsonl", "".join(map(evaluation, (0, 4, 12))).encode())
        for step in (4, 8):
            made, manifest = step_in(folder / "made", step)
            self.remote.put(made, manifest, Sent(folder / "note", manifest))

    def add_local(self, step: int) -> None:
        """Make a step that is not remote, and that is damaged where only those look who read tensors."""
        step_in(self.store.root, step)
        flip(self.store.folder(step) / OPTIMIZER, 150_000)

    def config(self, *, resume: str | None = "auto", **changed: Any) -> SFTConfig:
        ckpt = {"remote": self.url, "resume": resume}
        settings = {key: changed.pop(key) for key in list(changed) if key in SFTConfig.model_fields}
        return SFTConfig(
            output_dir=str(self.run), ckpt=CkptConfig(**{**ckpt, **changed}), **{"max_steps": 99, **settings}
        )

    def start(self, needs: tuple[str, ...] = SFT, **changed: Any) -> Start:
        config, away = with_remote(self.config(**changed), needs)
        return choose_start(config, needs=needs, away=away)


@pytest.fixture
def tiers(tmp_path: Path) -> Tiers:
    return Tiers(tmp_path)


def test_an_empty_disk_gets_no_tensors(tiers: Tiers):
    """The run goes on as itself from the newest step, which is no local step; pins are taken over.

    So are evaluations up to that step: those of later ones were of policies that nobody makes again.
    """
    config, away = with_remote(tiers.config(), SFT)
    start = choose_start(config, needs=SFT, away=away)
    assert (start.step, start.away, start.is_fork, start.named) == (8, True, False, False)
    assert start.folder == tiers.store.away / "step_8"
    assert away_in_step(start.folder).keys() == {"model/model.safetensors", OPTIMIZER}
    assert tiers.store.steps() == []
    assert (tiers.store.root / PINS).read_bytes() == b"[4]"
    run = config.run_directory()
    attempt = begin(run, config, start, {"trainer": {}}, command="sft")
    run.unlock()
    assert (attempt.run_id, attempt.start_step, attempt.resume_from) == ("run", 8, str(start.folder))
    assert [row["step"] for row in run.evals.rows()] == [0, 4]
    assert (tiers.start(resume=None, resume_step=8).step, tiers.start(resume="latest").away) == (8, True)


def test_servers_load_the_weights_from_the_disk(tiers: Tiers):
    """In RL they are brought whole; with answers that count before the trainer has loaded, all is."""
    start = tiers.start(RL)
    assert start.folder is not None
    assert away_in_step(start.folder).keys() == {OPTIMIZER}
    whole = (start.folder / "model/model.safetensors").read_bytes()
    assert whole == (tiers.there / "step_8/model/model.safetensors").read_bytes()
    assert not tiers.start(RL, self_check=False).away
    assert verify(tiers.store.folder(8))


@pytest.mark.parametrize(
    ("changed", "step"),
    [
        ({"export": {"folder": "exports"}}, 8),
        ({"resume": None, "resume_step": 4}, 4),
        ({"max_steps": 8}, 8),
    ],
)
def test_what_others_read_is_downloaded(tiers: Tiers, changed: dict[str, Any], step: int):
    """By the exporter, before later steps are set aside, and where no rank will load it."""
    start = tiers.start(**changed)
    assert (start.step, start.away, start.folder) == (step, False, tiers.store.folder(step))
    assert verify(tiers.store.folder(step))


def test_a_local_step_is_nearer(tiers: Tiers):
    """If it is whole and as new; one that is damaged is set aside. What an earlier start left is removed."""
    assert tiers.start().away
    tiers.remote.fetch(8, tiers.store)
    assert tiers.start().folder == tiers.store.folder(8)
    assert not tiers.store.away.exists()
    flip(tiers.store.folder(8) / "trainer/state.json", 3)
    assert tiers.start().away
    assert [path.name for path in tiers.store.abandoned.glob("damaged_*/step_8")] == ["step_8"]
    make_step(tiers.store.root, 12, {"trainer/state.json": b'{"seed": 0}'})
    assert tiers.start().step == 12


def test_what_ranks_could_not_read_is_downloaded(tiers: Tiers):
    """And if it is damaged in the store, the newest good step before it."""
    config, away = with_remote(tiers.config(), SFT)
    assert away is not None
    assert replaced(config, away)
    assert choose_start(config, needs=SFT).folder == tiers.store.folder(8)

    shutil.rmtree(tiers.store.root)
    config, away = with_remote(tiers.config(), SFT)
    assert away is not None
    flip(tiers.there / "step_8" / OPTIMIZER, 150_000)
    assert not replaced(config, away)
    start = choose_start(config, needs=SFT, damaged=StartDamaged(away, "changed"))
    assert (start.step, start.away) == (4, False)
    assert verify(tiers.store.folder(4)) == load_manifest(tiers.there / "step_4")


@pytest.mark.parametrize("here", [(), (4,), (4, 8)])
def test_the_remote_step_before_a_damaged_local_one_is_found(tiers: Tiers, here: tuple[int, ...]):
    """The damaged step is not remote, as its upload was refused; older local ones don't hide the remote one.

    A local step 8 is damaged, too, and only its tensors tell.
    """
    for step in here:
        tiers.remote.fetch(step, tiers.store)
    for step in {8}.intersection(here):
        flip(tiers.store.folder(step) / OPTIMIZER, 150_000)
    tiers.add_local(12)
    config, away = with_remote(tiers.config(), SFT)
    damaged = tiers.store.folder(12)
    assert choose_start(config, needs=SFT, away=away).folder == damaged
    assert not replaced(config, damaged)
    start = choose_start(config, needs=SFT, damaged=StartDamaged(damaged, "changed"))
    assert start.folder == tiers.store.folder(8)
    assert verify(tiers.store.folder(8)) == load_manifest(tiers.there / "step_8")
    begin(config.run_directory(), config, start, {"trainer": {}}, command="sft")
    assert tiers.remote.steps() == [4, 8]


@pytest.mark.parametrize(
    ("needs", "changed"),
    [(RL, {"self_check": False}), (SFT, {"max_steps": 8}), (SFT, {"resume": None, "resume_step": 4})],
)
def test_tensors_that_are_read_before_ranks_load_them_are_replaced_then(
    tiers: Tiers, needs: tuple[str, ...], changed: dict[str, Any]
):
    """Where `choose_start` would pass over the local step, the remote one of the same number is brought."""
    for step in (4, 8):
        tiers.remote.fetch(step, tiers.store)
        flip(tiers.store.folder(step) / OPTIMIZER, 150_000)
    step = changed.get("resume_step", 8)
    start = tiers.start(needs, **changed)
    assert start.folder == tiers.store.folder(step)
    assert verify(tiers.store.folder(step)) == load_manifest(tiers.there / f"step_{step}")


@pytest.mark.parametrize("known", ["a small file", "all is read"])
def test_a_damaged_step_that_no_store_has_is_passed_over(tiers: Tiers, known: str):
    """If its damage is known before ranks load it; a local step before it counts if its tensors are whole."""
    tiers.remote.fetch(8, tiers.store)
    flip(tiers.store.folder(8) / OPTIMIZER, 150_000)
    tiers.add_local(12)
    if known == "a small file":
        flip(tiers.store.folder(12) / "trainer/state.json", 3)
    start = tiers.start(RL, self_check=known != "all is read")
    assert (start.step, start.folder) == (8, tiers.store.folder(8))


def test_a_named_step_is_replaced_by_itself_alone(tiers: Tiers):
    """By the remote one of its number; nothing else is brought, since the user asked for no other step."""
    tiers.remote.fetch(8, tiers.store)
    config, _ = with_remote(tiers.config(resume=None, resume_step=8), SFT)
    flip(tiers.store.folder(8) / OPTIMIZER, 150_000)
    assert replaced(config, tiers.store.folder(8))
    assert choose_start(config, needs=SFT).folder == tiers.store.folder(8)
    assert verify(tiers.store.folder(8))

    tiers.add_local(12)
    for named in ({"resume_step": 12}, {"resume": str(tiers.store.folder(12))}):
        config, _ = with_remote(tiers.config(**{"resume": None, **named}), SFT)
        before = tiers.store.steps()
        assert not replaced(config, tiers.store.folder(12))
        assert tiers.store.steps() == before == [8, 12]


def test_a_run_whose_steps_are_all_damaged_does_not_begin_anew(tiers: Tiers):
    """It ends with exit code 2, although --ckpt.resume auto allows a beginning."""
    config, away = with_remote(tiers.config(), SFT)
    assert away is not None
    for step in (4, 8):
        flip(tiers.there / f"step_{step}" / OPTIMIZER, 150_000)
    assert not replaced(config, away)
    with pytest.raises(UsageError, match="there is no good checkpoint"):
        choose_start(config, needs=SFT, damaged=StartDamaged(away, "changed"))


# Stores that don't answer, or refuse


class Answering(BaseHTTPRequestHandler):
    """A store that answers everything with one status."""

    status: int

    def answer(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_PUT = do_DELETE = do_HEAD = answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("status", "code"), [(503, 1), (500, 1), (403, 2), (404, 2), (None, 1)])
def test_an_outage_is_no_bad_usage(
    status: int | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whatever starts runs again does so after 1, and not after 2. None: nothing listens there."""
    handler = type("Handler", (Answering,), {"status": status})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        port = server.server_port
        if status:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        else:
            server.server_close()
        for name, value in (("ENDPOINT_URL", f"http://127.0.0.1:{port}"), ("REGION", "us-east-1")):
            monkeypatch.setenv(f"AWS_{name}", value)
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            monkeypatch.setenv(f"AWS_{name}", "a")
        monkeypatch.setattr(launch_remote, "Objects", partial(Objects, retry_seconds=0.1))
        ckpt = CkptConfig(remote="s3://bucket/run", resume="auto")
        with pytest.raises(CairnError, match=r"^--ckpt.remote s3://bucket/run: ") as failed:
            with_remote(SFTConfig(output_dir=str(tmp_path / "run"), ckpt=ckpt), SFT)
        if status:
            server.shutdown()
    assert failed.value.exit_code == code
    assert ("run the same command again" in str(failed.value)) == (code == 1)


def test_no_credentials_are_bad_usage(tiers: Tiers, monkeypatch: pytest.MonkeyPatch):
    """Though the uploader, which had some before, asks again."""

    def probe(*_: object) -> None:
        raise NoCredentials("the environment has no credentials")

    monkeypatch.setattr(launch_remote, "probe", probe)
    with pytest.raises(UsageError, match=r"^--ckpt.remote file:.*: the environment has no credentials$"):
        tiers.start()


def test_steps_without_a_claim_say_whose_they_are(tiers: Tiers):
    """Where run.json was deleted, since it was damaged, or is no part of a copy: nothing is set aside."""
    tiers.remote.objects.put("run.json", b"")
    with pytest.raises(UsageError, match=r"run.json: is damaged; .* delete the object"):
        tiers.start()
    tiers.remote.objects.delete(["run.json"])
    with pytest.raises(UsageError, match="belongs to run run already"):
        tiers.start(resume=None)
    with pytest.raises(Taken, match="belongs to run run, and this is run other"):
        tiers.remote.claim("other", "other:1")
    with pytest.raises(Taken, match=r"run.json was deleted; start the run again"):
        tiers.remote.check_owner("run:1")
    assert (tiers.start().step, tiers.remote.steps()) == (8, [4, 8])
    tiers.remote.objects.put("committed/step_8.json", b"{")
    assert (tiers.remote.owner(), tiers.remote.newest_attempt()["branch"]) == ("run", "branch_1")
    tiers.remote.objects.put("committed/step_4.json", b"{")
    with pytest.raises(UsageError, match=r"has steps, but no run.json, and no manifest that can be read"):
        tiers.start()
