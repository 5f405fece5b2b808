"""Branches of a run: their settings, their turns, the rule, and the answers that they share."""

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.config.branches import BranchesConfig, KeepRule
from cairn.config.cli import load, load_branches
from cairn.config.inference import InferenceConfig
from cairn.config.orchestrator import OrchestratorConfig
from cairn.config.rl import RLConfig, serving_all
from cairn.config.shared import SupervisionConfig
from cairn.inference.supervised import SupervisedServer
from cairn.launch import main
from cairn.launch.branches.settings import SharedByBranches, at_servers, of_branch, refuse
from cairn.launch.branches.turns import begun, next_goal, stops
from cairn.orchestrator.ledger import FORMAT, Ledger, LedgerRun, read_ledger
from cairn.orchestrator.rollouts import AnswerGroup, Rollout
from cairn.orchestrator.siblings import Siblings
from cairn.run.branches import Branches, BranchStates, ranking
from cairn.run.directory import RunDirectory
from cairn.run.errors import CairnError, UsageError
from cairn.run.files import DamagedFile, write_json
from cairn.run.messages import ShippedBatch
from cairn.run.supervised import RestartRule

# The settings of a branch


BASE = ("@", "configs/reverse_text/rl.toml", "--trainer.optimizer.lr", "5e-3", "--ckpt")


def resolved(tmp_path: Path, *flags: str, **files: str) -> tuple[RLConfig, dict[str, RLConfig]]:
    """What a command line with these files of branches asks for, in all and for each branch."""
    argv = [*BASE, "--output-dir", str(tmp_path / "all"), *flags]
    for name, content in files.items():
        (tmp_path / f"{name}.toml").write_text(content)
        argv += ["--branch", str(tmp_path / f"{name}.toml")]
    config = load(RLConfig, argv)
    return config, load_branches(RLConfig, argv, config.branch)


def test_a_branch_has_its_file_over_all_that_is_given(tmp_path: Path):
    """Over flags, too; another type of a section drops what is given of the old one."""
    config, each = resolved(
        tmp_path,
        a="[trainer.optimizer]\nlr = 1e-3\n",
        b='seed = 3\n[trainer]\nloss = { type = "cispo" }\n[trainer.optimizer]\ntype = "muon"\n',
    )
    assert [Path(file).stem for file in config.branch] == list(each) == ["a", "b"]
    assert [own.trainer.optimizer.lr for own in (config, *each.values())] == [5e-3, 1e-3, 1e-5]
    assert [own.trainer.optimizer.type for own in each.values()] == ["adamw", "muon"]
    assert [own.trainer.loss.type for own in (config, each["a"])] == [config.trainer.loss.type] * 2
    assert each["b"].trainer.loss.type == "cispo"
    assert [own.orchestrator.seed for own in each.values()] == [0, 3]
    assert each["a"].branch == [], "a branch has none"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_steps = 4", r"a\.toml: max_steps can't differ between branches: the rule compares"),
        ('[ckpt]\nresume = "auto"', r"ckpt\.resume can't differ between branches: all branches start from"),
        (
            "[inference]\nport = 1",
            r"inference\.port can't differ between branches: all branches ask the same",
        ),
        ("[trainer]\nseed = 1", r"trainer\.seed: all roles share this value; give it once, as seed"),
        (
            "[trainer]\nworkerz = 1",
            r"--trainer\.workerz \(in .*a\.toml\): there is no such setting; did you mean",
        ),
        ("seed = -1", r"--seed \(in .*a\.toml\): it is -1, but must be at least 0"),
    ],
)
def test_a_branch_that_can_not_be(content: str, message: str, tmp_path: Path):
    with pytest.raises(UsageError, match=message):
        resolved(tmp_path, a=content, b="")


def test_branches_have_names_of_their_own(tmp_path: Path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.toml").write_text("")
    twice = ("--branch", str(tmp_path / "other" / "a.toml"))
    with pytest.raises(UsageError, match=r"other/a\.toml is called 'a' as well"):
        resolved(tmp_path, *twice, a="")
    with pytest.raises(UsageError, match="one branch is no choice"):
        resolved(tmp_path, a="")
    with pytest.raises(UsageError, match=r"would be called 'a b'; give the file a name of letters"):
        resolved(tmp_path, **{"a b": "", "c": ""})


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("10", "'10' is not STEP:COUNT"),
        ("10:0", "'10:0' is not STEP:COUNT"),
        ("10:2 10:1", "10:1 after 10:2: give later steps"),
        ("10:1 20:1", "20:1 after 10:1: give later steps, with fewer branches"),
    ],
)
def test_a_rule_that_makes_no_sense(keep: str, message: str):
    with pytest.raises(ValueError, match=message):
        BranchesConfig(keep=keep.split())


def test_the_rule_is_read_with_commas_or_without():
    rules = [KeepRule(10, 2), KeepRule(20, 1)]
    assert BranchesConfig(keep=["10:2,20:1"]).rules == BranchesConfig(keep=["10:2", "20:1"]).rules == rules


UNMERGED = '[trainer.lora]\nserve = "unmerged"\n'


@pytest.mark.parametrize(
    ("flags", "files", "message"),
    [
        (["--no-ckpt"], {}, "--branch: branches take turns.*add --ckpt$"),
        (["--no-ckpt.training-state"], {}, "add --ckpt, and leave ckpt.training_state on"),
        (["--ckpt.resume-step", "3"], {}, "--ckpt.resume-step 3: each branch has steps of its own"),
        (["--colocate"], {}, "--colocate: servers that sleep while one branch trains are not warm"),
        (["--stop-after", "3"], {}, "--stop-after 3: the turns of the branches say where each stops"),
        (["--branches.keep", "30:1"], {}, "--branches.keep 30:1: the branches end with step 20"),
        (["--branches.keep", "3:2"], {}, "--branches.keep 3:2: there are 2 branches; keep fewer of them"),
        (["--branches.at-once", "2"], {}, "a server holds the weights of one policy, so branches that train"),
        ([], {"a": UNMERGED}, 'a has trainer.lora.serve = "unmerged", and b has not'),
    ],
)
def test_what_can_not_be_done_with_branches(flags: list[str], files: dict, message: str, tmp_path: Path):
    config, each = resolved(tmp_path, *flags, **{"a": "", "b": "", **files})
    with pytest.raises(UsageError, match=message):
        refuse(config, each)


def test_adapters_that_are_computed_unmerged_may_train_side_by_side(tmp_path: Path):
    refuse(*resolved(tmp_path, "--branches.at-once", "2", a=UNMERGED, b=UNMERGED + "rank = 4"))


def test_the_servers_of_all_branches_have_what_each_of_them_needs(tmp_path: Path):
    """Also if it is not the first; what the command has given stays as it is."""
    replays = "[trainer]\nrouter_replay = true\n"
    config, each = resolved(
        *(tmp_path, "--inference.max-loras", "5", "--inference.port", "7007"),
        **{"a": UNMERGED, "b": replays + UNMERGED + "rank = 64", "c": UNMERGED + "rank = 32"},
    )
    assert config.inference.max_lora_rank is None
    served = serving_all(each, 2)
    assert (served.max_lora_rank, served.max_loras, served.return_experts) == (64, 10, True)
    assert served.port == 7007
    assert served.model_fields_set == config.inference.model_fields_set
    assert not serving_all({"a": each["a"]}, 1).return_experts


STATES = BranchStates(["a", "b", "c"], "reward/mean", "max", 2, 20)


def test_a_branch_is_a_run_of_its_own(tmp_path: Path):
    """In its own folder, with the servers of all; its settings are read as they are written."""
    flags = ("--ckpt.remote", "s3://bucket/all", "--ckpt.dir", str(tmp_path / "elsewhere"))
    config, each = resolved(tmp_path, *flags, a="seed = 1", b="")
    branches, shared = Branches(config.output_dir), SharedByBranches({}, ["http://127.0.0.1:1"], "/model")
    states = replace(STATES, names=["a", "b"], since=3)
    own = of_branch("a", each["a"], branches, shared, states)
    assert own.output_dir == own.trainer.output_dir == str(tmp_path / "all" / "branches" / "a")
    assert own.ckpt is not None
    assert own.ckpt == own.orchestrator.ckpt
    assert (own.ckpt.resume, own.ckpt.remote) == ("auto", "s3://bucket/all/a")
    assert own.ckpt.dir == str(tmp_path / "elsewhere" / "a")
    assert own.orchestrator.siblings == {"b": str(tmp_path / "all" / "branches" / "b")}
    assert own.orchestrator.spared_batches == 3 + 1 + 2 * own.orchestrator.max_off_policy_steps
    assert own.orchestrator.branched_at == 3
    assert own.orchestrator.inference_url == [], "alone, it starts a server of its own"
    assert at_servers(own, shared.urls).orchestrator.inference_url == shared.urls
    assert (own.model.name, own.trainer.model.name, own.branch) == ("/model", "/model", [])
    file = tmp_path / "written.json"
    file.write_text(own.model_dump_json())
    assert RLConfig.model_validate_json(file.read_text()) == load(RLConfig, ["@", str(file)]) == own
    alone = each["a"].model_copy(update={"branches": BranchesConfig(share_answers=False)})
    assert of_branch("a", alone, branches, shared, states).orchestrator.siblings == {}
    forked = of_branch("a", each["a"], branches, shared, replace(states, start="/other/step_3"))
    assert forked.ckpt is not None
    assert forked.ckpt.resume == "/other/step_3"
    (tmp_path / "elsewhere" / "a" / "step_4").mkdir(parents=True)
    (tmp_path / "elsewhere" / "a" / "step_4" / "manifest.json").touch()
    forked = of_branch("a", each["a"], branches, shared, replace(states, start="/other/step_3"))
    assert forked.ckpt is not None
    assert forked.ckpt.resume == "auto", "it has a step of its own"


# Turns


def test_branches_take_turns_of_so_many_steps_and_stop_where_the_rule_chooses():
    """Each goes to the next stop before any goes beyond it, wherever they were interrupted."""
    at = stops(0, 20, 6, [KeepRule(9, 1)])
    assert at == [6, 9, 12, 18, 20]
    assert stops(5, 20, 10, []) == [15, 20]
    steps, taken = {"a": 0, "b": 4}, []
    while (found := next_goal(steps, at)) is not None:
        goal, names = found
        taken.append((goal, *names))
        steps[names[0]] = goal
    assert taken == [
        *[(6, "a", "b"), (6, "b"), (9, "a", "b"), (9, "b"), (12, "a", "b"), (12, "b")],
        *[(18, "a", "b"), (18, "b"), (20, "a", "b"), (20, "b")],
    ]


def test_branches_go_on_only_if_the_user_says_so_and_they_are_the_same(tmp_path: Path):
    config, _ = resolved(tmp_path, a="", b="")
    branches = Branches(config.output_dir)
    states = begun(config, ["a", "b"], branches)
    assert states == replace(STATES, names=["a", "b"], window=5)
    assert not branches.path.exists(), "nothing is written before they are checked"
    branches.begin(states)
    with pytest.raises(UsageError, match=r"there are the branches a, b; go on with --ckpt\.resume auto"):
        begun(config, ["a", "b"], branches)
    config, _ = resolved(tmp_path, "--ckpt.resume", "auto", "--branches.window", "3", a="", b="")
    assert begun(config, ["a", "b"], branches) == replace(states, window=3)
    with pytest.raises(UsageError, match="the branches a, b, and the command has a, c; give the same ones"):
        begun(config, ["a", "c"], branches)
    config = config.model_copy(update={"output_dir": str(branches.run("a"))})
    RunDirectory(branches.run("a")).metrics.path.parent.mkdir(parents=True)
    RunDirectory(branches.run("a")).metrics.append({"step": 1})
    with pytest.raises(UsageError, match="is the folder of a run, which has no branches"):
        begun(config, ["a", "b"], Branches(config.output_dir))
    config, _ = resolved(tmp_path, "--ckpt.resume", str(tmp_path / "step_3"), a="", b="")
    with pytest.raises(UsageError, match=r"--ckpt\.resume .*step_3: "):
        begun(config, ["a", "b"], Branches(tmp_path / "other"))


# The rule


@pytest.fixture
def branches(tmp_path: Path) -> Branches:
    """Three, of 4 steps each: by the last two, b is the best and a the worst."""
    found = Branches(tmp_path / "all")
    found.begin(STATES)
    for name, rewards in {"a": (9, 9, 0, 1), "b": (0, 0, 3, 3), "c": (0, 0, 2, 3)}.items():
        found.run(name).mkdir()
        for step, reward in enumerate(rewards, 1):
            row = {"step": step, "reward/mean": reward, "nan": float("nan"), "loss": -reward}
            RunDirectory(found.run(name)).metrics.append(row)
    return found


def test_the_best_go_on_and_the_others_say_why_they_do_not(branches: Branches):
    states = branches.choose(4, 2)
    assert states == branches.states()
    assert states.going_on == ["b", "c"]
    assert states.choices[0].scores == {"a": 0.5, "b": 3.0, "c": 2.5}
    end = states.ended["a"]
    assert (end.step, end.by) == (4, "rule")
    assert end.reason == ("after step 4 it was number 3 of 3 by reward/mean: 0.5; kept: b 3, c 2.5")
    RunDirectory(branches.run("c")).metrics.append({"step": 5, "reward/mean": 99})
    assert branches.choose(4, 2) == states, "what is decided stays"
    assert branches.choose(4, 1) == states
    branches.file.write_text("{")
    with pytest.raises(DamagedFile, match=r"branches\.json: is damaged: .* Remove it, and go on with --ckpt"):
        branches.choose(4, 2)
    branches.file.unlink()
    branches.begin(STATES)
    assert branches.choose(4, 2) == states, "though there are later steps by now"


def test_a_branch_that_the_user_has_ended_is_not_compared(branches: Branches):
    branches.end("b", "its reward is hacked")
    states = branches.choose(4, 1)
    assert states.going_on == ["c"]
    assert states.choices[0].scores == {"a": 0.5, "c": 2.5}
    assert states.ended["b"].reason == "its reward is hacked"
    for name, message in {
        "c": "it is the last branch",
        "b": "it has ended: its reward",
        "d": "no such branch",
    }.items():
        with pytest.raises(UsageError, match=f"--end {name}: .*{message}"):
            branches.end(name, "again")


def test_lower_may_be_better_and_what_is_no_number_is_worst(branches: Branches):
    states = branches.record(lambda before: replace(before, metric="loss", mode="min"))
    assert branches.choose(4, 1).going_on == ["b"]
    branches.begin(replace(states, metric="nan", choices=[], ended={}))
    assert branches.choose(4, 2).going_on == ["a", "b"], "equal ones are kept in their order"
    assert "no number; kept: a no number" in branches.states().ended["c"].reason


def test_a_metric_that_is_not_there_is_named(branches: Branches):
    branches.record(lambda before: replace(before, metric="reward/maen"))
    message = "branch a has no such number in steps 3 to 4 .*; did you mean reward/mean"
    with pytest.raises(CairnError, match=re.escape("branches.metric = 'reward/maen': ") + message):
        branches.choose(4, 1)
    assert branches.states().choices == []


@given(st.dictionaries(st.sampled_from("abcdef"), st.none() | st.integers(-2, 2).map(float), min_size=1))
def test_the_ranking_is_stable(scores: dict[str, float | None]):
    ranked = ranking(scores, "max")
    assert sorted(ranked) == sorted(scores)
    numbers = [-math.inf if (score := scores[name]) is None else score for name in ranked]
    assert numbers == sorted(numbers, reverse=True)
    order = list(scores)
    for one, other in itertools.pairwise(ranked):
        assert scores[one] != scores[other] or order.index(one) < order.index(other)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["branches.before_record", "branches.recorded"])
def test_a_decision_survives_whoever_makes_it(point: str, branches: Branches, tmp_path: Path):
    """Killed before or after it is on record: the next process comes to the same one, or finds it."""
    code = "import sys; from cairn.run.branches import Branches; Branches(sys.argv[1]).choose(4, 1)"
    environment = {**os.environ, "CAIRN_FAULT": f"{point}:kill"}
    killed = subprocess.run([sys.executable, "-c", code, str(branches.path)], env=environment)
    assert killed.returncode == -signal.SIGKILL
    assert len(branches.states().choices) == (point == "branches.recorded")
    states = branches.choose(4, 1)
    assert states.going_on == ["b"]
    assert len(states.choices) == 1
    code = code.replace("choose(4, 1)", "end('b', 'why')")
    other = Branches(tmp_path / "other")
    other.begin(STATES)
    killed = subprocess.run([sys.executable, "-c", code, str(other.path)], env=environment)
    assert killed.returncode == -signal.SIGKILL
    assert list(other.states().ended) == (["b"] if point == "branches.recorded" else [])


def test_the_command_lists_and_ends_branches(
    branches: Branches, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def command(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["cairn", "branches", *map(str, arguments)])
        return main.main()

    branches.choose(4, 2)
    assert command(branches.path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["branch", "state", "step", "reward/mean", "why"]
    assert lines[4] == "after step 4 the rule kept b, c of a (0.5), b (3), c (2.5)"
    assert [line.split()[:4] for line in lines[1:4]] == [
        *(["a", "ended", "4", "0.5"], ["b", "waiting", "4", "3.0"], ["c", "waiting", "4", "2.5"])
    ]
    run = RunDirectory(branches.run("b"))
    assert run.lock()
    assert command(branches.path, "--end", "b", "--reason", "too long", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["branches"][1] == {
        "branch": "b",
        "state": "ending",
        "step": 4,
        "score": 3.0,
        "why": "too long",
    }
    assert found["choices"][0]["kept"] == ["b", "c"]
    run.unlock()
    assert command(branches.path, "--end", "c") == 2
    assert "it is the last branch that goes on" in capsys.readouterr().err
    assert command(branches.path, "--reason", "x") == 2
    assert "--reason goes with --end NAME" in capsys.readouterr().err
    assert command(branches.run("a")) == 2
    assert "holds no branches of a run: it has no branches.json" in capsys.readouterr().err


# Servers


def look_long(server: SupervisedServer, end: float) -> None:
    """Look after it until `end` (`time.monotonic`)."""
    while time.monotonic() < end:
        server.look_after(lambda: 0)
        time.sleep(0.05)


@pytest.mark.slow
def test_a_server_that_dies_or_hangs_is_started_again_and_not_for_ever(tmp_path: Path):
    supervision = SupervisionConfig(heartbeat_timeout=5.1)
    config, rule = InferenceConfig(port=1), RestartRule(1)
    server = SupervisedServer("inference", config, Branches(tmp_path).logs, supervision, rule)
    try:
        first = server.pid
        os.kill(first, signal.SIGKILL)
        end = time.monotonic() + 60
        while server.pid == first:
            assert time.monotonic() < end
            server.look_after(lambda: 0)
        os.kill(server.pid, signal.SIGSTOP)
        hung = r"the inference server hung \(.*\); the end of .*inference\.log"
        with pytest.raises(CairnError, match=hung):
            look_long(server, end)
        assert not server.is_ready
    finally:
        server.stop()


# Answers that branches share


RUN = LedgerRun("own", "branch_1", FORMAT, 0, 100, 2, 2, 1)
RECIPE: dict[str, Any] = {
    "orchestrator": {
        "settings": {"sampling.temperature": 1.0, "environment.name": "sums", "advantage.type": "grpo"},
        "environment": {"problems": 100, "messages": {"1": "abc"}},
    },
    "trainer": {"model": "m", "tokenizer": "t", "settings": {}},
}


def whole(place: int, *steps: int) -> AnswerGroup:
    """A prompt with two whole answers of branch b, by the policies of these steps."""
    versions = [(f"b:branch_1:{step}", i, i + 1) for i, step in enumerate(steps)]
    tokens, logprobs = list(range(5, 5 + len(steps))), [-0.25 * (1 + i) for i in range(len(steps))]
    rollouts = [
        Rollout(50 + place + i, tokens, logprobs, list(versions), "stop", f"text {i}", i / 3, {"part": i / 7})
        for i in range(2)
    ]
    return AnswerGroup(place, 10 + place, min(steps), [1, 2, place], rollouts)


class Pair:
    """The folders of two branches, of which b has answers."""

    def __init__(self, folder: Path, bound: int, since: int = 0):
        self.own, self.other = (RunDirectory(folder / name) for name in ("a", "b"))
        self.run = replace(RUN, max_off_policy_steps=bound)
        self.ledgers = [Ledger(one.ledger, self.run, None, 0) for one in (self.own, self.other)]
        for one in (self.own, self.other):
            write_json(one.recipe, RECIPE)
        self.config = OrchestratorConfig(
            siblings={"b": str(self.other.path)}, branched_at=since, max_off_policy_steps=bound
        )

    def answer(self, group: AnswerGroup) -> None:
        """Have b answer a prompt."""
        self.ledgers[1].issue(replace(group, rollouts=[]))
        self.ledgers[1].record(group.place, dict(enumerate(group.rollouts)))

    def ask(self, place: int, batch: int, policy_step: int = 0) -> AnswerGroup:
        """Have the own branch ask a prompt for a batch."""
        group = AnswerGroup(place, 10 + place, policy_step, [], [])
        self.ledgers[0].issue(group)
        Siblings(self.config, self.own, self.ledgers[0]).answer(group, batch)
        return group


def test_an_answer_is_taken_as_it_is_and_says_whose_it_is(tmp_path: Path):
    """With its logprobs and policies, in the own ledger, so that the other branch may go."""
    pair = Pair(tmp_path, 2)
    pair.answer(whole(3, 0, 1))
    group = pair.ask(3, 2)
    assert group.usable
    assert group.rollouts == whole(3, 0, 1).rollouts
    assert group.prompt_ids == [1, 2, 3]
    assert group.oldest_step == -1, "one step of b's policy is one step back"
    pair.other.ledger.unlink()
    (kept,) = Ledger(pair.own.ledger, pair.run, None, 0).waiting()
    assert kept == group
    assert kept.shared is not None
    assert (kept.shared.branch, kept.shared.since) == ("b", 0)
    assert {place: one.branch for place, one in read_ledger(pair.own.ledger).shared.items()} == {3: "b"}
    pair.ledgers[0].drop(3, "stale", 4)
    assert pair.ask(3, 2).rollouts == [], "and is asked again"
    assert read_ledger(pair.own.ledger).shared == {}


@given(bound=st.integers(0, 3), since=st.integers(0, 2), theirs=st.integers(0, 4), ours=st.integers(0, 4))
def test_the_steps_of_both_branches_since_the_start_bound_what_is_shared(
    bound: int, since: int, theirs: int, ours: int, tmp_path_factory: pytest.TempPathFactory
):
    pair = Pair(tmp_path_factory.mktemp("pair"), bound, since)
    pair.answer(whole(0, since, since + theirs))
    group = pair.ask(0, since + ours + 1, since + ours)
    assert bool(group.rollouts) == (theirs + ours <= bound)
    if group.rollouts:
        assert since + ours - group.oldest_step == theirs + ours
    for ledger in pair.ledgers:
        ledger.close()


def changed(part: str, name: str, value: object) -> dict[str, Any]:
    """A recipe with another value."""
    recipe = json.loads(json.dumps(RECIPE))
    section = recipe[part]["settings"] if "." in name else recipe[part]
    section[name] = value
    return recipe


SAMPLED_AT_2 = [{"name": "sampling.max_tokens", "step": 2, "was": 1, "now": 2}]


@pytest.mark.parametrize(
    ("recipe", "shares"),
    [
        (changed("orchestrator", "advantage.type", "rloo"), True),
        (changed("trainer", "optimizer.lr", 1.0), True),
        (changed("orchestrator", "sampling.temperature", 0.5), False),
        (changed("orchestrator", "environment.code", "digest"), False),
        (changed("orchestrator", "environment", {"problems": 100, "messages": {"1": "xyz"}}), False),
        (changed("orchestrator", "changes", SAMPLED_AT_2), False),
        (changed("orchestrator", "changes", [{**SAMPLED_AT_2[0], "name": "pools.easy"}]), True),
        (changed("trainer", "tokenizer", "other"), False),
        (changed("trainer", "date", "2026-11-29"), False),
    ],
)
def test_only_what_would_be_sampled_alike_is_shared(recipe: dict, shares: bool, tmp_path: Path):
    """Whatever is learned from it, and how."""
    pair = Pair(tmp_path, 1)
    pair.answer(whole(0, 0))
    write_json(pair.other.recipe, recipe)
    assert bool(pair.ask(0, 1).rollouts) == shares


def test_what_is_not_whole_or_of_another_run_is_not_taken(tmp_path: Path):
    pair = Pair(tmp_path, 1)
    partial, failed, program, far = whole(0, 0), whole(1, 0), whole(2, 0), whole(3, 0)
    partial.rollouts[1].finish_reason = None
    partial.rollouts[1].reward = None
    failed.rollouts[0].reward, failed.rollouts[0].failed = None, "no sandbox"
    for one in (partial, failed, program, replace(far, problem=99)):
        pair.answer(one)
    pair.ledgers[1].finish(2, 0, program.rollouts[0], 0)
    pair.ledgers[1]._database.execute("UPDATE samples SET tokens = NULL WHERE place = 2")
    pair.ledgers[1]._database.commit()
    pair.answer(whole(4, 0))
    assert [bool(pair.ask(place, 1).rollouts) for place in range(5)] == [False] * 4 + [True]
    assert pair.ask(9, 1).rollouts == [], "which nobody has been asked"
    pair.answer(whole(5, 0))
    pair.config = pair.config.model_copy(update={"router_replay": True})
    assert pair.ask(5, 1).rollouts == []
    pair.config = pair.config.model_copy(update={"router_replay": False})
    pair.own.recipe.unlink()
    assert pair.ask(6, 1).rollouts == []
    other = Pair(tmp_path / "other", 1)
    other.ledgers[1].close()
    other.other.ledger.unlink()
    other.ledgers[1] = Ledger(other.other.ledger, replace(other.run, seed=1), None, 0)
    other.answer(whole(0, 0))
    assert other.ask(0, 1).rollouts == [], "another seed asks others"
    other.other.ledger.write_bytes(b"no ledger" * 100)
    assert other.ask(1, 1).rollouts == []


def test_answers_that_others_may_take_outlive_the_checkpoint(tmp_path: Path):
    """And those of answers that a third branch has taken go on under the name of whoever sampled them."""
    pair = Pair(tmp_path, 1)
    for place, step in ((0, 0), (1, 0), (2, 1), (3, 2), (4, 3)):
        pair.answer(whole(place, step))
        batch = ShippedBatch(place + 1, [[place, place]], 2, 2, "digest", step)
        pair.ledgers[1].ship(batch, {place: 10 + place})
    pair.ledgers[1].fold(5, spared=pair.config.spared_batches)
    assert pair.config.spared_batches == 3
    assert [group["place"] for group in read_ledger(pair.other.ledger).groups] == [0, 1, 2]
    assert pair.ask(2, 1).rollouts
    third = OrchestratorConfig(siblings={"a": str(pair.own.path)}, max_off_policy_steps=1)
    ledger = Ledger(tmp_path / "c.sqlite", pair.run, None, 0)
    group = AnswerGroup(2, 12, 0, [], [])
    ledger.issue(group)
    Siblings(third, pair.own, ledger).answer(group, 1)
    assert group.shared is not None
    assert group.shared.branch == "b"
