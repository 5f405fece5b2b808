"""`ckpt` commands on URLs: steps in a real S3 server, as source and as target."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import draws
import numpy as np
import pytest
import recorded_runs
from families import make
from runs import Finished, flip
from safetensors.numpy import save
from safetensors.torch import load_file
from stores import BadNetwork, make_step, s3_bucket

import cairn
from cairn.checkpoint.checksums import CHUNK_BYTES
from cairn.checkpoint.manifest import load_manifest
from cairn.checkpoint.step_folder import verify
from cairn.checkpoint.store import CheckpointStore
from cairn.config.ckpt import CkptConfig
from cairn.config.cli import load
from cairn.launch import main
from cairn.remote import Objects, RemoteStore
from cairn.remote.remote_runs import RemoteRun, mirrored, remote_view
from cairn.remote.run_files import RunFiles, summary
from cairn.remote.uploads import RunUploads
from cairn.run.output import no_progress
from cairn.watch import commands as watch_commands
from cairn.watch.page.api import RunApi

MANY = 10_000


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The bucket of a real S3 server; the environment leads to it."""
    with s3_bucket(tmp_path_factory.mktemp("s3")) as bucket:
        yield bucket


@pytest.fixture
def url(bucket: Path, tmp_path: Path) -> str:
    """An empty prefix."""
    return f"s3://bucket/{tmp_path.name}"


@pytest.mark.slow
def test_a_run_in_an_object_store_is_looked_at_as_one_on_a_disk(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """By each command, the page and Python; what is not there is not made up."""
    run = recorded_runs.busy(tmp_path / "busy", steps=25)
    settings = json.loads(run.config.read_text())
    settings["ckpt"]["dir"] = str(tmp_path / "elsewhere")  # its steps are looked for at the URL all the same
    run.config.write_text(json.dumps(settings))
    remote = RemoteStore(Objects(url))
    RunFiles(remote.objects).put([run.config])
    assert not RemoteRun(url, tmp_path / "copy").exists(), "it has only begun"
    source = CheckpointStore(run.checkpoints)
    folder, manifest = source.folder(30), source.manifest(30)
    for name in manifest.files:
        remote.objects.put(f"step_30/{name}", (folder / name).read_bytes())
    for name in ("step_30/manifest.json", "committed/step_30.json"):
        remote.objects.put(name, (folder / "manifest.json").read_bytes())
    RunFiles(remote.objects).put([run.metrics.path, run.history.path, run.evals.path])

    def said(command: str, *arguments: object) -> tuple[int, str]:
        told = load(watch_commands.COMMANDS[command], [*map(str, arguments)])
        return told.execute(), capsys.readouterr().out

    there, here = (
        json.loads(said("diagnose", url, "--json")[1]),
        json.loads(said("diagnose", run.path, "--json")[1]),
    )
    assert there["tokens"] == here["tokens"]
    assert there["time"]["seconds"]["computed"] == here["time"]["seconds"]["computed"]
    shown = json.loads(said("watch", url, "--json")[1])
    assert (shown["path"], shown["command"], shown["state"], shown["step"]) == (url, "rl", "unknown", 25)
    assert (shown["saved"]["step"], shown["resume"], shown["roles"]) == (30, None, [])
    assert shown["max_steps"] == 100
    above, name = url.rsplit("/", 1)
    assert [one["path"] for one in json.loads(said("runs", above, "--json")[1])] == [f"{above}/{name}"]
    assert said("report", url, "--out", tmp_path / "report.html")[0] == 0
    assert url in (tmp_path / "report.html").read_text()
    opened = cairn.Run(url)
    assert opened.metrics["loss"].tolist() == cairn.Run(run.path).metrics["loss"].tolist()
    assert opened.token_account() == cairn.Run(run.path).token_account()
    assert opened.snapshot().config == settings
    for what in (lambda: opened.steps, opened.rollouts):
        with pytest.raises(cairn.UsageError, match="not read from an object store"):
            what()
    with mirrored(above) as runs:
        page = RunApi(runs.folder, None, runs)
        assert [line.path for line in page.runs()] == [url]
        (step,) = page.checkpoints(name)["rows"]
        assert (step["step"], step["state"], page.checkpoints(name)["folder"]) == (
            30,
            "complete",
            url,
        )
        assert page.timeline(name)["total"] == 25
        assert page.overview(name)["config"] == settings
        run.metrics.append({"step": 26, "loss": 0.5})
        RunFiles(remote.objects).put([run.metrics.path])
        remote.objects.delete(["committed/step_30.json"])
        runs.refresh()
        assert page.row(name, 26) == {"step": 26, "loss": 0.5}
        assert page.checkpoints(name)["rows"] == []
    assert not runs.folder.exists(), "copies last as long as they are looked at"
    with (
        pytest.raises(cairn.UsageError, match=f"there is no run: .*; below it are {name}"),
        remote_view(above),
    ):
        pass


@pytest.fixture
def ckpt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """Run the `ckpt` command in this process; no credential may be printed."""

    def run(*arguments: object) -> Finished:
        monkeypatch.setattr("sys.argv", ["ckpt", *map(str, arguments)])
        monkeypatch.setattr("cairn.run.output.lines", lambda *_: no_progress)  # a slow machine prints some
        capsys.readouterr()
        code = main.ckpt()
        captured = capsys.readouterr()
        output = captured.out + captured.err
        assert os.environ["AWS_SECRET_ACCESS_KEY"] not in output
        return Finished(code, output)

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Hugging Face directory."""
    return make("qwen3_tied", tmp_path_factory.mktemp("model") / "hf")


def commit(run: Path, model: Path, step: int, **about: object) -> Path:
    """A step with the weights of a Hugging Face folder, and some state."""
    files = {f"model/{path.name}": path.read_bytes() for path in model.iterdir()}
    files["trainer/state.json"] = json.dumps({"progress": {"step": step}, "optimizer": "AdamW"}).encode()
    moments = {"model.norm.weight.exp_avg": np.full(64, step, np.float32)}
    files["trainer/optimizer.safetensors"] = save(moments, {"format": "pt"})
    return make_step(run / "checkpoints", step, files, **about)[0]


def remote(url: str) -> RemoteStore:
    return RemoteStore(Objects(url, retry_seconds=5))


@pytest.mark.slow
def test_copies_in_all_directions(ckpt, url: str, bucket: Path, model: Path, tmp_path: Path):
    """From here to there, there to there, and back; each copy is the step, and what claims the prefix."""
    first, second = (commit(tmp_path / "run", model, step) for step in (4, 8))
    copied = ckpt("copy", second, url)
    assert (copied.code, f"{url}/step_8 is a copy of {second}, and verified" in copied.output) == (0, True)
    assert ckpt("copy", tmp_path / "run", url).code == 0, "what is there already is no error"
    assert ckpt("copy", first, url).code == 0
    assert remote(url).steps() == [4, 8]
    assert remote(url).owner() == "run"
    answer = json.loads(ckpt("copy", f"{url}/step_4", f"{url}-too", "--json").output)
    assert answer == {"step": f"{url}/step_4", "folder": f"{url}-too/step_4", "linked": False}
    assert remote(f"{url}-too").verify(4) == load_manifest(first)
    back = ckpt("copy", url, tmp_path / "back")
    assert back.code == 0, back.output
    assert verify(tmp_path / "back/checkpoints/step_8") == load_manifest(second)
    again = ckpt("copy", f"{url}/step_8", tmp_path / "back")
    assert (again.code, "exists already" in again.output) == (1, True)

    damaged = bucket / tmp_path.name / "step_8/trainer/optimizer.safetensors"
    flip(damaged, damaged.stat().st_size - 3)
    older = ckpt("copy", url, tmp_path / "older")
    assert (older.code, f"passed over: {url}/step_8/trainer/optimizer" in older.output) == (0, True)
    assert verify(tmp_path / "older/checkpoints/step_4") == load_manifest(first)
    assert not list(tmp_path.glob(".cairn-*")), "temporary folders are removed"


@pytest.mark.slow
def test_copies_that_make_no_sense(ckpt, url: str, model: Path, tmp_path: Path):
    """Nothing is written, and the sentence says what to do."""
    step = commit(tmp_path / "run", model, 4)
    other = commit(tmp_path / "other", model, 5, run_id="other")
    assert ckpt("copy", step, url).code == 0
    held = commit(tmp_path / "held", model, 5, run_id="other")
    for arguments, code, message in [
        ((step, f"{url}/step_9"), 2, f"is the URL of a step; give that of a run, {url}"),
        ((other, url), 2, "holds the run run, and"),
        ((f"{url}/step_4", held.parent.parent), 2, "holds the run other, and"),
        ((step, url, "--link"), 2, "leave out --link"),
        ((f"{url}/step_7", tmp_path / "x"), 1, f"{url}: there is no step 7"),
        ((f"{url}-none", tmp_path / "x"), 1, f"{url}-none: has no checkpoint"),
        ((step, "s3://no-such-bucket/x"), 1, "bucket does not exist"),
        ((step, "s3://key:hidden@bucket/x"), 2, "a URL must hold no credentials"),
        ((f"file://{tmp_path}/typo", tmp_path / "x"), 2, "/typo: there is no such folder"),
        ((step, "ftp://bucket/x"), 2, "known are s3://, gs://, az://, file://"),
    ]:
        finished = ckpt("copy", *arguments)
        assert (finished.code, message in finished.output) == (code, True), finished.output
        assert "hidden" not in finished.output
    assert not (tmp_path / "x").exists() or not list((tmp_path / "x").rglob("step_*"))
    assert remote(url).steps() == [4]
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize("command", ["verify", "list", "prune"])
def test_a_place_without_checkpoints_is_no_place_to_look_at(ckpt, url: str, tmp_path: Path, command: str):
    """A URL and a folder are refused alike, also beside what is no step."""
    options = ("--keep-last", "1") if command == "prune" else ()
    remote(url).objects.put("run/metrics.jsonl", b"{}")
    (tmp_path / "metrics.jsonl").write_text("{}")
    for place in (url, tmp_path):
        finished = ckpt(command, place, *options)
        assert (finished.code, f"{place}: there are no checkpoints here" in finished.output) == (2, True)


def test_a_copy_claims_the_prefix_before_a_step_is_there(
    ckpt, url: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whenever it is killed, no other run takes the prefix for an empty one; an attempt keeps its claim."""

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    step = commit(tmp_path / "run", model, 4)
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(RemoteStore, "put", killed)
        ckpt("copy", step, url)
    assert remote(url).owner() == "run"
    remote(url).claim("run", "run:2")
    assert ckpt("copy", step, url).code == 0
    remote(url).check_owner("run:2")


@pytest.mark.slow
def test_exports_averages_and_forks_of_remote_steps(ckpt, url: str, model: Path, tmp_path: Path):
    """Are those of the local steps."""
    steps = [commit(tmp_path / "run", model, step) for step in (4, 8)]
    for step in steps:
        assert ckpt("copy", step, url).code == 0
    exported = ckpt("export", url, tmp_path / "hf")
    assert (exported.code, f"holds {url}/step_8 as hf" in exported.output) == (0, True), exported.output
    weights = load_file(tmp_path / "hf/model.safetensors")
    assert weights.keys() == load_file(model / "model.safetensors").keys()
    averaged = ckpt("average", f"{url}/step_4", steps[1], tmp_path / "mean")
    assert (averaged.code, f"0.5000  {url}/step_4" in averaged.output) == (0, True), averaged.output
    forked = ckpt("fork", f"{url}/step_4", tmp_path / "fork")
    assert forked.code == 0, forked.output
    assert load_manifest(tmp_path / "fork/checkpoints/step_4").parent.run_id == "run"
    assert ckpt("diff", f"{url}/step_4", steps[0]).code == 0
    everything = ckpt("export", url, tmp_path / "all", "--all", "--json")
    assert everything.code == 0, everything.output
    assert load_file(tmp_path / "all/step_8/model.safetensors").keys() == weights.keys()
    again = ckpt("export", url, tmp_path / "all", "--all")
    assert (again.code, again.output.count("was there already")) == (0, 2), again.output
    refused = ckpt("export", steps[0], f"{url}/all", "--all")
    assert (refused.code, "--all writes to a local folder" in refused.output) == (2, True)
    refused = ckpt("audit", url)
    assert (refused.code, "give the run's local folder" in refused.output) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["s3", "file"])
def test_what_commands_make_goes_to_a_url(ckpt, url: str, model: Path, tmp_path: Path, scheme: str):
    """The same files as in a local folder; and a run that goes on below the URL, or elsewhere."""
    there = url if scheme == "s3" else f"file://{tmp_path}/bucket"
    steps = [commit(tmp_path / "run", model, step) for step in (4, 8)]
    for command, *arguments in [("export", steps[0]), ("average", *steps)]:
        made = ckpt(command, *arguments, f"{there}/{command}")
        assert made.code == 0, made.output
        assert ckpt(command, *arguments, tmp_path / command).code == 0
        objects = Objects(f"{there}/{command}")
        local = {path.name: path.read_bytes() for path in (tmp_path / command).iterdir()}
        assert {name: objects.get(name) for name, _ in objects.list()} == local
        assert ckpt("diff", f"{there}/{command}", tmp_path / command).code == 0
        again = ckpt(command, *arguments, f"{there}/{command}")
        assert (again.code, "has objects already" in again.output) == (2, True)
    for command, source in [("fork", steps[0]), ("import", model)]:
        place = f"{there}/{command}"
        answer = json.loads(ckpt(command, source, place, "--json").output)
        assert answer["folder"].startswith(f"{place}/step_")
        assert remote(place).owner() == answer["run_id"]
        assert ckpt("verify", place).code == 0
        again = ckpt(command, source, place)
        assert (again.code, "has checkpoints already" in again.output) == (2, True)
    assert "--ckpt.remote" in ckpt("fork", steps[0], f"{there}/another").output
    refused = ckpt("fork", steps[0], f"{there}/linked", "--link")
    assert (refused.code, "leave out --link" in refused.output) == (2, True)


def test_a_large_file_goes_to_a_url_in_parts(url: str, tmp_path: Path):
    """Larger than a chunk; what arrives is what was read."""
    (tmp_path / "made/in").mkdir(parents=True)
    content = np.random.default_rng(1).bytes(CHUNK_BYTES + 7)
    (tmp_path / "made/in/large").write_bytes(content)
    objects = Objects(url)
    objects.put_folder(tmp_path / "made", tmp_path / "sent", no_progress)
    assert objects.list() == [("in/large", len(content))]
    assert bytes(objects.read("in/large", 0, len(content))) == content


def test_imports_from_there(ckpt, url: str, model: Path, tmp_path: Path):
    """A Hugging Face directory in a bucket becomes a run here; a step of Cairn, or nothing, does not."""
    objects = Objects(url)
    for path in model.iterdir():
        objects.put(f"hf/{path.name}", path.read_bytes())
    compared = ckpt("diff", f"{url}/hf", model)
    assert (compared.code, "0 of" in compared.output) == (0, True), compared.output
    imported = ckpt("import", f"{url}/hf", tmp_path / "run")
    assert imported.code == 0, imported.output
    step = verify(tmp_path / "run/checkpoints/step_1")
    assert step.parts == ["model"]
    alone = ckpt(
        "import", f"{url}/hf/model.safetensors", tmp_path / "alone", "--model", f"{url}/hf", "--format", "hf"
    )
    assert "there is no such object" not in alone.output, "a single object is found"
    assert ckpt("copy", commit(tmp_path / "one", model, 4), url).code == 0
    for place, message in [
        (f"{url}/step_4", "is a checkpoint of Cairn"),
        (url, "is a checkpoint of Cairn"),
        (f"{url}/nothing", "there is no such object"),
    ]:
        refused = ckpt("import", place, tmp_path / "x")
        assert (refused.code, message in refused.output) == (2, True), refused.output
    assert not (tmp_path / "x").exists()
    assert not list(tmp_path.glob(".cairn-*"))


def test_a_fork_knows_where_its_step_was_uploaded_to(ckpt, url: str, model: Path, tmp_path: Path):
    """From the settings of the run, if that has an object store; nothing is asked there."""
    for remote_url in (url, None):
        run, there = tmp_path / f"run_{remote_url is None}", tmp_path / f"fork_{remote_url is None}"
        step = commit(run, model, 4)
        (run / "config.json").write_text(json.dumps({"ckpt": {"remote": remote_url}}))
        assert ckpt("fork", step, there).code == 0
        uploads = RunUploads(CheckpointStore(there / "checkpoints"), CkptConfig(), last=9)
        assert uploads.origin() == (f"{url}/step_4" if remote_url else None)


@pytest.mark.slow
def test_prunes_by_rules(ckpt, url: str, model: Path, tmp_path: Path):
    """The best, the last and pinned ones stay; what is being uploaded is left alone; damage is not newest."""
    for step, loss in ((2, 0.1), (4, 0.9), (6, 0.8), (8, 0.7), (10, 0.6)):
        assert ckpt("copy", commit(tmp_path / "run", model, step, metrics={"loss": loss}), url).code == 0
    there = remote(url)
    there.objects.put("run/pins.json", b"[4]")
    there.objects.put("step_1/model/model.safetensors", b"of a step that is being uploaded")
    there.objects.delete(["step_10/trainer/state.json"])
    rules = ("--keep-last", 1, "--keep-best", 1, "--metric", "loss", "--mode", "min")
    planned = json.loads(ckpt("prune", url, *rules, "--dry-run", "--json").output)
    assert there.steps() == [2, 4, 6, 8, 10]
    pruned = json.loads(ckpt("prune", url, *rules, "--json").output)
    assert pruned == {**planned, "dry_run": False}
    assert pruned["deleted"] == [f"{url}/step_6"]
    assert pruned["kept"] == {"2": ["best"], "4": ["pin"], "8": ["newest good"], "10": ["newest", "last"]}
    assert pruned["damaged"][0].startswith(f"{url}/step_10/trainer/state.json: is missing")
    assert there.steps() == [2, 4, 8, 10]
    assert there.verify(8)
    names = [name for name, _ in there.objects.list()]
    assert "step_1/model/model.safetensors" in names
    assert not [name for name in names if name.startswith("step_6/")]
    assert [row["step"] for row in json.loads(ckpt("list", url, "--json").output)] == [2, 4, 8, 10]
    there.objects.put("run/pins.json", b"{")
    refused = ckpt("prune", url, "--keep-last", 1)
    assert (refused.code, "pins.json: is damaged" in refused.output) == (1, True)
    for arguments, message in [
        ((url,), "give --keep-last or --keep-best"),
        ((f"{url}/step_4", "--keep-last", 1), "is a single step"),
        ((url, "--keep-last", 1, "--pin", 4), "--pin: is for a run directory"),
        ((url, "--keep-best", 1), "needs metric and mode"),
    ]:
        refused = ckpt("prune", *arguments)
        assert (refused.code, message in refused.output) == (2, True), refused.output
    assert there.steps() == [2, 4, 8, 10]


@pytest.mark.slow
def test_prunes_what_is_left(ckpt, url: str, bucket: Path, model: Path, tmp_path: Path):
    """Of uploads that were cut a day ago; and, if asked, the steps that were set aside."""
    for step in (2, 4, 6):
        assert ckpt("copy", commit(tmp_path / "run", model, step), url).code == 0
    there = remote(url)
    assert there.set_aside_after(2, "branch_1") == [4, 6]
    there.objects.put("step_6/model/new", b"of a step that is being uploaded")
    for name in ("step_1/a", "step_3/a"):
        there.objects.put(name, b"1")
    os.utime(bucket / tmp_path.name / "step_1/a", (time.time() - 90_000,) * 2)
    os.utime(bucket / tmp_path.name / "abandoned/branch_1/step_6.json", (time.time() - 60,) * 2)

    def left() -> set[str]:
        return {name.partition("/")[0] for name, _ in there.objects.list()} - {"catalog.json", "run.json"}

    dry = json.loads(ckpt("prune", url, "--keep-last", 1, "--dry-run", "--json").output)
    pruned = json.loads(ckpt("prune", url, "--keep-last", 1, "--json").output)
    assert pruned == {**dry, "dry_run": False}
    assert (pruned["debris"], pruned["abandoned"]) == ([f"{url}/step_1"], [])
    assert left() == {"committed", "abandoned", "step_2", "step_3", "step_4", "step_6"}
    printed = ckpt("prune", url, "--abandoned").output
    assert f"deleted {url}/abandoned/branch_1" in printed
    assert left() == {"committed", "step_2", "step_3", "step_6"}, "step 6 may be that of the new branch"
    assert there.verify(2)


@draws.seldom
def test_many_steps_are_listed_with_few_requests(
    ckpt, bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Ten thousand: a page of the store's list for every thousand, and one object with what is shown."""
    _, manifest = make_step(tmp_path / "run", 1, {"trainer/state.json": b"{}"})
    folder = bucket / tmp_path.name
    (folder / "committed").mkdir(parents=True)
    for step in range(1, MANY + 1):
        (folder / f"committed/step_{step}.json").touch()
    etag = hashlib.md5(b"").hexdigest()
    rows = [{**summary(manifest), "step": step, "etag": etag} for step in range(1, MANY)]
    (folder / "catalog.json").write_text(json.dumps(rows))
    last = manifest.model_copy(update={"step": MANY})
    (folder / f"committed/step_{MANY}.json").write_bytes(last.to_json())
    network = BadNetwork(os.environ["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", network.url)
    try:
        listed = ckpt("list", f"s3://bucket/{tmp_path.name}", "--json")
    finally:
        network.close()
    assert listed.code == 0, listed.output
    assert [row["step"] for row in json.loads(listed.output)] == list(range(1, MANY + 1))
    assert network.requests <= MANY / 1000 + 3
