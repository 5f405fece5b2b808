"""Recipes: their files belong together; the program that runs them says what is the same and what is not."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cairn.config.cli import COMMANDS, load

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import recipe as program
import recipe_facts
from recipe import ROOT, RecipeRun, recipes

WRITES = """
import json, pathlib, sys
out = pathlib.Path(sys.argv[1]); out.mkdir(parents=True, exist_ok=True)
steps = int(sys.argv[sys.argv.index("--max-steps") + 1]) if "--max-steps" in sys.argv else 4
more = 1.1 if "0.1" in sys.argv else 1
rows = [{"step": i + 1, "loss": more / (i + 1 + int(sys.argv[2]))} for i in range(steps)]
(out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
with open("ran", "a") as file: print(out, file=file)
"""


def toml(*stages: str, head: str = "") -> str:
    about = 'title = "A title"\nmodel = "a model"\naxis = "loss"\nseeds = [0, 1]\n'
    return about + head + "".join(f"\n[[stages]]\n{stage}\n" for stage in stages)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with two stages that write four rows each, and one that does nothing with what it is given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "writes.py").write_text(WRITES)
    made = tmp_path / "mine"
    made.mkdir()
    (made / "recipe.toml").write_text(
        toml(
            'name = "first"\ncommand = "{python} writes.py {out} {seed}"\ncurve = "loss"\ndrawn = true',
            'name = "second"\ncommand = "{python} -c pass {first}"',
            'name = "third"\ncommand = "{python} writes.py {out} {seed} 0.1"\ncurve = "loss"\ndrawn = true\n'
            'after = "first"',
            head='check = { first = 2 }\nequal = [["first", "second"]]\nbeside = [["first", "third"]]\n',
        )
    )
    return made


def main(*argv: str | Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["recipe.py", *map(str, argv)])
    return program.main()


def test_a_recipe_is_run_once_and_its_results_come_from_the_run_directories(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert main(folder, monkeypatch=monkeypatch) == 0
    results = json.loads((folder / "results.json").read_text())
    assert results["stages"]["first"]["1"]["curve"] == [1 / 2, 1 / 3, 1 / 4, 1 / 5]
    assert (
        results["stages"]["first"]["0"]["command"] == "python writes.py outputs/recipes/mine/seed_0/first 0"
    )
    assert results["versions"]["torch"]
    assert (folder / "results.png").stat().st_size > 1000
    assert results["equal"] == [{"stages": ["first", "second"], "same_bits": False}], "nothing was saved"
    assert results["beside"] == [
        {"stages": ["first", "third"], "first_step": pytest.approx(1 / 11), "any_step": pytest.approx(1 / 11)}
    ]
    assert len(Path("ran").read_text().splitlines()) == 4
    assert main(folder, monkeypatch=monkeypatch) == 0
    assert len(Path("ran").read_text().splitlines()) == 4, "what is done is not repeated"
    assert main(folder, "--check", "--outputs", "again", monkeypatch=monkeypatch) == 0
    assert "steps 1 to 2, loss: the same to the bit" in capsys.readouterr().out


@pytest.mark.slow
def test_results_of_other_seeds_stay_while_nothing_has_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Then a run of theirs would give the same. Else a mixture would be published."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder.parent)]
    for words in (["init", "-q"], ["add", "mine"], ["commit", "-q", "-m", "A recipe"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(recipe_facts, "ROOT", folder.parent)

    def seeds(*argv: str) -> list[str]:
        assert main(folder, "--seeds", *argv, monkeypatch=monkeypatch) == 0
        results = json.loads((folder / "results.json").read_text())
        assert [list(results["stages"][name]) for name in ("second", "third")] == [
            list(results["stages"]["first"])
        ] * 2
        return list(results["stages"]["first"])

    assert seeds("1") == ["1"]
    assert seeds("0") == ["0", "1"]
    both = json.loads((folder / "results.json").read_text())
    assert both["beside"][0]["any_step"] == pytest.approx(1 / 11), "of both seeds"
    assert seeds("0", "1") == ["0", "1"]
    assert json.loads((folder / "results.json").read_text()) == both
    capsys.readouterr()
    path = folder / "recipe.toml"
    path.write_text('note = "It says nothing."\n' + path.read_text())
    assert seeds("1") == ["0", "1"], "what is said of the recipe is not what it does"
    (folder / "settings.toml").write_text("lr = 2\n")
    for words in (["add", "-N", "mine/settings.toml"],):
        subprocess.run([*git, *words], check=True)
    assert seeds("1") == ["1"]
    assert "results of seed 0 are left out, since these changed: recipe" in capsys.readouterr().out
    (folder / "settings.toml").unlink()
    subprocess.run([*git, "rm", "-q", "--cached", "mine/settings.toml"], check=True)
    assert seeds("0") == ["0", "1"]
    path.write_text(path.read_text().replace("{seed} 0.1", "{seed} 0.1 more"))
    assert seeds("1") == ["1"], "another command"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "instructions", "code", "said"),
    [
        (1.0, "AVX2", 0, "the same to the bit"),
        (1.0 + 1e-6, "AVX2", 1, "the same to rounding"),
        (1.0 + 1e-6, "others", 0, "the same to rounding"),
        (1.01, "others", 1, ", not "),
    ],
)
def test_first_steps_are_compared(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    factor: float,
    instructions: str,
    code: int,
    said: str,
):
    """To the bit where the instructions are the same, else to rounding."""
    monkeypatch.setattr(program, "machine", lambda: {"instructions": "AVX2"})
    assert main(folder, monkeypatch=monkeypatch) == 0
    path = folder / "results.json"
    results = json.loads(path.read_text())
    results["machine"]["instructions"] = instructions
    first = results["stages"]["first"]["0"]
    first["curve"] = [value * factor for value in first["curve"]]
    path.write_text(json.dumps(results))
    assert main(folder, "--check", "--outputs", "again", monkeypatch=monkeypatch) == code
    assert said in capsys.readouterr().out


def test_what_is_missing_is_said_before_anything_runs(folder: Path, monkeypatch: pytest.MonkeyPatch):
    path = folder / "recipe.toml"
    text = path.read_text()
    with pytest.raises(SystemExit, match="no results to compare with"):
        main(folder, "--check", monkeypatch=monkeypatch)
    path.write_text('packages = { no_such = "--no-deps no-such==1.0" }\n' + text)
    with pytest.raises(SystemExit, match=r"uv pip install --no-deps no-such==1\.0"):
        main(folder, monkeypatch=monkeypatch)
    path.write_text('data = { texts = "a folder of texts" }\n' + text)
    with pytest.raises(SystemExit, match="--data texts=PATH is missing: a folder of texts"):
        main(folder, monkeypatch=monkeypatch)
    with pytest.raises(SystemExit, match="--data other: the recipe does not ask for that"):
        main(folder, "--data", "texts=a", "other=b", monkeypatch=monkeypatch)
    path.write_text("titel = 3\n" + text)
    with pytest.raises(SystemExit, match=r"recipe\.toml.*\n.*\n?titel"):
        main(folder, monkeypatch=monkeypatch)
    with pytest.raises(SystemExit, match=r"is no recipe: it has no recipe\.toml"):
        main(folder.parent, monkeypatch=monkeypatch)
    path.write_text('packages = { some_package = "some-package" }\n' + text)
    with pytest.raises(SystemExit, match=r"packages\.some_package"):
        main(folder, monkeypatch=monkeypatch)
    assert not Path("ran").exists()


FAILS_ONCE = """
import os, sys
if not os.path.exists("tried"):
    open("tried", "w").close()
    sys.exit(3)
"""


def test_the_parts_of_a_command_are_added_up(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """It goes on where it was ended, and its time is that of all its parts."""
    Path("fails.py").write_text(FAILS_ONCE)
    (folder / "recipe.toml").write_text(
        toml('name = "one"\nonce = true\ncommand = "{python} fails.py {package.pytest}"').replace(
            "seeds", f'packages = {{ pytest = "pytest=={pytest.__version__}" }}\nseeds'
        )
    )
    with pytest.raises(SystemExit, match="ended with exit code 3; the same command goes on from there"):
        main(folder, monkeypatch=monkeypatch)
    one = RecipeRun(folder, {})
    one.run([0])
    path = Path("outputs/recipes/mine/one.stage.json")
    record = json.loads(path.read_text())
    first, second = (part["seconds"] for part in record["parts"])
    assert min(first, second) > 0
    results = one.results([0])
    found = results["stages"]["one"]["0"]
    assert found["seconds"] == pytest.approx(first + second, abs=0.05)
    assert found["parts"] == 2
    assert found["command"] == "python fails.py '{package.pytest}'", "no path of this machine"
    assert results["versions"]["pytest"] == pytest.__version__
    one.run([0])
    assert json.loads(path.read_text()) == record, "what is done is not repeated"


@pytest.mark.parametrize("folder", recipes(), ids=lambda path: path.name)
def test_the_commands_of_a_recipe_can_start(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Their settings are read; what they name of earlier stages is one, and so is what is checked."""
    monkeypatch.chdir(ROOT)
    run = RecipeRun(folder, {})
    given = {f"data.{name}" for name in run.recipe.data} | {f"package.{name}" for name in run.recipe.packages}
    run.recipe = run.recipe.model_copy(update={"packages": {}})
    names = [stage.name for stage in run.recipe.stages]
    assert set(run.recipe.check) <= set(names)
    assert {name for some in (*run.recipe.equal, *run.recipe.beside) for name in some} <= set(names)
    for i, stage in enumerate(run.recipe.stages):
        assert stage.after is None or stage.after in names[:i]
        used = set(re.findall(r"\{([\w.]+)\}", stage.command))
        known = {"python", "seed", "out", *names[:i], *given}
        assert used - {"question"} <= known, stage.name
        words = run.words(stage, 0)
        if words[0] in COMMANDS:
            load(COMMANDS[words[0]], words[1:])
        scripts = [word for word in words if word.endswith(".py")]
        assert all((ROOT / script).is_file() for script in scripts)


@pytest.mark.parametrize("folder", recipes(), ids=lambda path: path.name)
def test_results_are_those_of_the_recipe(folder: Path):
    path = folder / "results.json"
    if not path.exists():
        return
    results = json.loads(path.read_text())
    recipe = RecipeRun(folder, {}).recipe
    assert list(results["stages"]) == [stage.name for stage in recipe.stages]
    assert (results["title"], results["model"]) == (recipe.title, recipe.model)
    assert all(one["same_bits"] for one in results["equal"])
    assert not re.search(r"(?<![\w.}])/\w", path.read_text()), "no path of a machine"
    assert (folder / "results.png").exists()


def test_the_page_of_results_is_made_from_them():
    written = program.TABLE.read_text().splitlines()
    assert written == program.page().splitlines(), "uv run scripts/recipe.py --table"
