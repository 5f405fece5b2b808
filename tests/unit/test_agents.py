"""Agents: programs in processes of their own that know only a URL. They die, and nothing is lost."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import draws
import pytest
from errands import Servers
from runs import DEADLINE, REPOSITORY
from test_programs import CHAT, RUN, VERSION, Interrupted, Power, complete, digest

from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig, SamplingConfig
from cairn.orchestrator.completion.completers import ProgramRunner
from cairn.orchestrator.environments import (
    AgentPrograms,
    BadEnvironment,
    agent_process,
    check_environment,
    make_environment,
)
from cairn.orchestrator.rollouts import AnswerGroup
from cairn.run.processes import KEEPER

AGENT = r"""
import json, os, signal, sys, urllib.request

turns = int(sys.argv[1])
problem = json.load(open(os.environ["CAIRN_PROBLEM"]))
with open(os.environ["PIDS"], "a") as file:
    file.write(f"{os.getpid()}\n")


def ask(messages):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def die_once(turn):
    # With KILLS, the agent kills itself after each turn, once.
    mark = os.path.join(os.environ["KILLS"], os.environ["CAIRN_SEED"] + "-" + str(turn))
    if os.path.isdir(os.environ["KILLS"]) and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


messages = [{"role": "user", "content": problem["prompt"]}]
for turn in range(turns):
    messages.append(ask(messages))
    die_once(turn)
    messages.append({"role": "user", "content": str(turn)})
print("said", messages[-2]["content"])
"""
REWARDS = """
from cairn.orchestrator.environments import Rewards


def by_conversation(problem, messages, exit_code, folder, output):
    assert problem["prompt"] == messages[0]["content"]
    assert output == f"said {messages[-1]['content']}\\n"
    assert (folder / "problem.json").is_file()
    return Rewards({"length": len(messages[-1]["content"]), "code": exit_code}, {"code": 0.0})


async def late(messages, **rest):
    return {"messages": len(messages), "names": len(rest)}


def nothing(messages):
    return None


def needy(messages, secret, **rest):
    return 1.0


def fails_first(folder, messages):
    marks = folder.parent.parent / "marks"
    marks.mkdir(exist_ok=True)
    mark = marks / folder.name
    if not mark.exists():
        mark.touch()
        raise ConnectionError("the judge is away")
    return float((folder / "problem.json").is_file())


judged = set()


async def judge(messages, exit_code):
    key = str(messages)
    if key not in judged:
        judged.add(key)
        raise ConnectionError("the judge is away")
    return 1.0


def plain(messages):
    return len(messages)
"""
ROWS = [{"prompt": text, "answer": text.upper()} for text in ("ab", "cd", "ef")]


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a data set, an agent and rewards."""
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "my_agent.py").write_text(AGENT)
    (tmp_path / "my_agent_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def configuration(task: Path, script: str | None = None, **args: Any) -> OrchestratorConfig:
    """With an agent of four turns, or one that is a script."""
    env = {"PIDS": str(task / "pids"), "KILLS": str(task / "kills")}
    command = [sys.executable, str(task / "my_agent.py"), "4"]
    if script is not None:
        command = [sys.executable, "-S", "-c", script]
    args = {"command": command, "data": str(task / "problems.jsonl"), "env": env, **args}
    return OrchestratorConfig(
        environment=EnvironmentConfig(name="agent", args=args),
        sampling=SamplingConfig(max_tokens=6, chunk_tokens=2),
        output_dir=str(task / "run"),
        samples_per_prompt=2,
        reward_retries=1,
        reward_retry_seconds=0.0,
    )


def runner(config: OrchestratorConfig, ledger: Path, servers: Servers) -> ProgramRunner:
    servers.version = VERSION
    ledger.mkdir(exist_ok=True)
    environment = AgentPrograms(make_environment(config.environment), config)
    opened = Interrupted(ledger / "ledger.sqlite", RUN, None, 0)
    return ProgramRunner(config, environment, CHAT, servers, opened, {VERSION})


def finish(one: ProgramRunner) -> AnswerGroup:
    """The first prompt; when it ends, however it does, so have the agents."""
    try:
        return complete(one)
    finally:
        for thread in threading.enumerate():
            if thread.name == "environment loop":
                thread.join(DEADLINE)


def work(task: Path, servers: Servers | None = None, **args: Any) -> AnswerGroup:
    return finish(runner(configuration(task, **args), task / "ledger", servers or Servers()))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def test_an_agents_rollouts(task: Path):
    """Its conversation is one branch; each has a folder of its own, which is gone at the end."""
    servers = Servers()
    group = work(task, servers, reward="my_agent_rewards:by_conversation")
    assert group.usable
    for rollout in group.rollouts:
        assert {turn.branch for turn in rollout.turns} == {0}
        assert len(rollout.turns) == 4
        assert rollout.parts == {"length": rollout.reward, "code": 0.0}
    assert not list((task / "run" / "agents").iterdir())
    log = (task / "run" / "logs" / "agents.log").read_text()
    assert log.count("the agent ended with exit code 0\nsaid") == 2
    assert set(Counter(seed for seed, _ in servers.asked).values()) == {1}


def test_an_agent_that_is_killed_after_every_turn(task: Path):
    """By SIGKILL. It is started again and hears at once what it was answered before."""
    calm = work(task)
    (task / "kills").mkdir()
    config = configuration(task).model_copy(update={"reward_retries": 4})
    servers = Servers()
    group = finish(runner(config, task / "again", servers))
    assert len(list((task / "kills").iterdir())) == 2 * 4
    assert digest(group) == digest(calm)
    assert group == calm
    assert set(Counter(seed for seed, _ in servers.asked).values()) == {1}
    assert [rollout.diverged for rollout in group.rollouts] == [0, 0]
    assert (task / "run" / "logs" / "agents.log").read_text().count("was killed by SIGKILL") == 2 * 4


@draws.seldom
def test_the_orchestrator_dies_at_every_turn(task: Path):
    """Agents die with it, and those that are started again go on where they were."""
    calm = work(task)
    servers, deaths = Servers(), 0
    while True:
        one = runner(configuration(task), task / "again", servers)
        one.ledger.left = 1
        try:
            group = finish(one)
            break
        except Power:
            deaths += 1
    assert deaths >= 4
    assert digest(group) == digest(calm)
    assert group == calm
    assert set(Counter(seed for seed, _ in servers.asked).values()) == {1}
    pids = (task / "pids").read_text().split()
    assert len(pids) >= 2 * 3
    wait_until(lambda: all(is_gone(int(pid)) for pid in pids))


@pytest.mark.parametrize("reward", ["fails_first", "judge"])
def test_a_reward_that_fails_is_asked_again_without_the_agent(task: Path, reward: str):
    group = work(task, reward=f"my_agent_rewards:{reward}")
    assert group.rewards == [1.0, 1.0]
    assert [len(rollout.turns) for rollout in group.rollouts] == [4, 4]
    assert len((task / "pids").read_text().split()) == 2
    assert not list((task / "run" / "agents").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("reward", "agents"), [("plain", {2}), ("late", {3, 4})])
def test_the_orchestrator_dies_before_the_reward(
    task: Path, monkeypatch: pytest.MonkeyPatch, reward: str, agents: set[int]
):
    """Only a reward that wants the agent's folder needs the agent again."""
    script = f"open({str(task / 'pids')!r}, 'a').write('1 ')\n{ASK}"
    config = configuration(task, script=script, reward=f"my_agent_rewards:{reward}")
    calm = finish(runner(config, task / "calm", Servers()))
    (task / "pids").unlink()
    servers = Servers()
    one = runner(config, task / "again", servers)
    record, ends = one.ledger.record_call, list[str]()

    def die(place: int, sample: int, call: Any, snapshot: Any = None) -> None:
        record(place, sample, call, snapshot)
        ends.extend([call.name] if call.name == "end" else [])
        if len(ends) == 2:
            raise Power

    monkeypatch.setattr(one.ledger, "record_call", die)
    with pytest.raises(Power):
        finish(one)
    group = finish(runner(config, task / "again", servers))
    assert group == calm
    assert [rollout.diverged for rollout in group.rollouts] == [0, 0]
    assert set(Counter(seed for seed, _ in servers.asked).values()) == {1}
    assert len((task / "pids").read_text().split()) in agents


def test_a_reward_file_that_is_a_pipe_blocks_nobody(task: Path):
    script = ASK + "os.mkfifo(os.environ['CAIRN_REWARD'])"
    assert "is no regular file" in (work(task, script=script, reward="file").failure or "")


ORCHESTRATOR = """
import asyncio, sys
from pathlib import Path
from agent_process import run_agent  # alone, since importing the rest takes seconds

agent = [sys.executable, "-S", "-c", sys.argv[2]]
folder = Path(sys.argv[1])
asyncio.run(run_agent(agent, {}, folder, limit=None, waited=lambda: 0.0, log=print))
"""
WITH_CHILD = """
import os, subprocess, sys, time
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]
child = subprocess.Popen(sleep, start_new_session=True)
with open("half", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename("half", "pids")
time.sleep(1000)
"""


@pytest.mark.parametrize("victim", ["orchestrator", "agent"])
def test_no_process_of_an_agent_is_left(victim: str, tmp_path: Path):
    """Whoever is killed: its children die as well, also in sessions of their own."""
    command = [sys.executable, "-c", ORCHESTRATOR, str(tmp_path), WITH_CHILD]
    path = {**os.environ, "PYTHONPATH": str(Path(agent_process.__file__).parent)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=path) as orchestrator:
        wait_until((tmp_path / "pids").exists)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert not any(map(is_gone, pids))
        os.kill(orchestrator.pid if victim == "orchestrator" else pids[0], signal.SIGKILL)
        wait_until(lambda: all(map(is_gone, pids)))
        assert orchestrator.wait(DEADLINE) == (-signal.SIGKILL if victim == "orchestrator" else 0)
        assert orchestrator.stdout is not None
        wanted = "" if victim == "orchestrator" else "Ended(code=-9, output='')\n"
        assert orchestrator.stdout.read().decode() == wanted


# Rewards

ASK = """
import json, os, sys, urllib.request
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "a"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, headers))
"""
WRITE = "open(os.environ['CAIRN_REWARD'], 'w').write"


@pytest.mark.parametrize(
    ("end", "args", "reward", "parts"),
    [
        ("sys.exit(0)", {}, 1.0, {"agent": 1.0}),
        ("sys.exit(3)", {}, 0.0, {"agent": 0.0}),
        (
            "sys.exit(3)",
            {"reward": "my_agent_rewards:late", "exit_codes": [3]},
            6,
            {"messages": 2, "names": 4},
        ),
        (f"{WRITE}('0.25')", {"reward": "file"}, 0.25, {"agent": 0.25}),
        (WRITE + """('{"a": 1, "b": 0.5}')""", {"reward": "file"}, 1.5, {"a": 1.0, "b": 0.5}),
    ],
)
def test_where_a_reward_comes_from(task: Path, end: str, args: dict, reward: float, parts: dict):
    group = work(task, script=ASK + end, **args)
    assert group.rewards == [reward, reward]
    assert group.rollouts[0].parts == parts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "args", "message"),
    [
        (
            "print('no'); sys.exit(3)",
            {"reward": "file"},
            "exit code 3, and exit_codes are [0]; its last output: no",
        ),
        ("os.kill(os.getpid(), 9)", {}, "the agent was killed by SIGKILL; it printed nothing"),
        ("os.kill(os.getpid(), 15)", {}, "the agent was killed by SIGTERM"),
        ("", {"reward": "file"}, "has not written its reward to the file CAIRN_REWARD"),
        (
            f"{WRITE}('no')",
            {"reward": "file"},
            "the file CAIRN_REWARD that the agent wrote can't be read: Exp",
        ),
        (
            f"{WRITE}('NaN')",
            {"reward": "file"},
            "the reward must be finite, but it is not one finite number: nan",
        ),
        ("", {"reward": "my_agent_rewards:nothing"}, "unscored: environment"),
    ],
)
def test_an_agent_that_fails_is_started_again_and_then_has_failed(
    task: Path, end: str, args: dict, message: str
):
    """It is never taken for 0; nothing is sampled again for it."""
    servers = Servers(longest=2)
    group = work(task, servers, script=ASK + end, **args)
    assert message in (group.failure or "")
    assert (group.whole, len(servers.asked)) == (True, 2)


FORM = ASK.replace('"messages"', '"response_format": {"type": "json_object"}, "messages"', 1)


@pytest.mark.parametrize(("script", "misfits"), [(ASK, 0.0), (FORM, 1.0), (FORM * 2, 2.0)])
def test_answers_without_the_form_that_an_agent_wants_are_counted(task: Path, script: str, misfits: float):
    """They reach it as they are."""
    group = work(task, script=script, structured="check")
    assert group.rewards == [1.0, 1.0]
    assert group.rollouts[0].parts == {"agent": 1.0, "misfits": misfits}


def test_an_agent_that_fails_at_an_answer_without_the_form_is_told_why(task: Path):
    failure = work(task, script=FORM + "sys.exit(3)", structured="check", exit_codes=[0]).failure
    why = "an answer without the form that it asked for: its content was to be JSON and is not"
    assert f"exit_codes are [0]; {why}; it printed nothing" in (failure or "")
    refused = work(task, script=FORM).failure or ""
    assert "was never answered by the model" in refused


def test_an_agent_that_takes_too_long_has_failed(task: Path):
    group = work(task, script="import time; time.sleep(1000)", time_limit=0.2)
    assert "has not ended within 0.2 s (orchestrator.environment.args.time_limit" in (group.failure or "")


def test_the_time_in_which_an_agent_waits_for_the_model_does_not_count(task: Path):
    """However slow the servers are, it has its time for itself."""

    async def agent() -> None:
        ended = await agent_process.run_agent(
            [sys.executable, "-S", "-c", "import time; time.sleep(0.5)"],
            {},
            task,
            limit=0.01,
            waited=lambda: 1000.0,
            log=lambda _: None,
        )
        assert ended.code == 0

    asyncio.run(agent())


REFUSED = f"""
import urllib.error
try:
    exec({ASK!r}.replace('"messages"', '"temperature": 9, "messages"'))
except urllib.error.HTTPError as error:
    sys.exit(error.read().decode())
"""


@pytest.mark.parametrize(
    ("script", "how", "why"),
    [
        ("print(1)", "ended with exit code 0", "; its last output: 1"),
        ("import no_such_package", "ended with exit code 1", "No module named 'no_such_package'"),
        (REFUSED, "ended with exit code 1", "temperature"),
    ],
)
def test_an_agent_that_is_never_answered_has_failed(task: Path, script: str, how: str, why: str):
    """Whatever its exit code counts for; the message says what it has printed, such as why it was refused."""
    failure = work(task, script=script).failure or ""
    assert f"the agent {how} and was never answered by the model" in failure
    assert why in failure


SHORTENS = f"""
import urllib.error
try:
    exec({ASK!r}.replace('"content": "a"', '"content": "a" * 200'))
except urllib.error.HTTPError as error:
    refused = error.code, json.load(error)["error"]["code"]
    assert refused == (400, "context_length_exceeded"), refused
    if sys.argv[1:] == []:
        exec({ASK!r})
"""


def test_an_agent_whose_first_request_is_too_long_hears_of_it_and_may_shorten_it(task: Path):
    """As with any later one. If it gives up instead, its rollout has failed, and the run goes on."""
    group = work(task, Servers(max_model_len=40), script=SHORTENS)
    assert group.usable, group.failure
    assert [len(rollout.turns) for rollout in group.rollouts] == [2, 2]
    assert all(rollout.token_ids for rollout in group.rollouts)
    shutil.rmtree(task / "ledger")
    failure = work(task, Servers(max_model_len=40), script=SHORTENS.replace("== []", "== 0")).failure or ""
    assert "was never answered" in failure


def test_what_an_agent_prints_is_kept_in_part(task: Path):
    script = ASK + "sys.stdout.write('begin' + 'x' * 1000000 + 'end')"
    assert work(task, script=script).usable
    log = (task / "run" / "logs" / "agents.log").read_text()
    assert len(log) < 2 * 34000
    assert log.count("beginx") == log.count("xend") == log.count("bytes left out]") == 2


def test_an_agent_knows_of_no_secrets(task: Path, monkeypatch: pytest.MonkeyPatch):
    """Only of variables that are known to be harmless, and those that the settings name."""
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("MY_TOOL", "/opt/tool")
    script = ASK + "print(json.dumps(dict(os.environ)))"
    assert work(task, script=script, inherit=["MY_TOOL"]).usable
    lines = (task / "run" / "logs" / "agents.log").read_text().splitlines()
    seen = next(json.loads(line) for line in lines if line.startswith("{"))
    assert "WANDB_API_KEY" not in seen
    assert (seen["MY_TOOL"], seen["OPENAI_MODEL"]) == ("/opt/tool", "policy")
    assert seen["OPENAI_BASE_URL"].startswith("http://127.0.0.1:")
    assert seen["OPENAI_BASE_URL"] == seen["ANTHROPIC_BASE_URL"] + "/v1"
    assert seen["OPENAI_API_KEY"] == seen["ANTHROPIC_API_KEY"]
    assert seen["ANTHROPIC_MODEL"] == "policy"


# Settings


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"command": []}, "command = []: it must be a list of texts"),
        ({"command": "agent"}, "command = 'agent': it must be a list of texts"),
        (
            {"command": ["no-such-agent"]},
            "begins with 'no-such-agent', and there is no such program on the PATH",
        ),
        ({"command": ["./my_agent.py"]}, "my_agent.py', which is not executable: chmod +x /"),
        ({"data": "nowhere.jsonl"}, "nowhere.jsonl: there is no such file"),
        ({"reward": "best"}, "reward = 'best': not one of exit_code, file, nor module:function"),
        (
            {"reward": "my_agent_rewards:needy"},
            "my_agent_rewards:needy' needs secret; there are problem, mess",
        ),
        ({"time_limit": 0}, "time_limit = 0: it must be more than 0 seconds"),
        ({"ignore": "temperature"}, "ignore = 'temperature': it must be a list of fields"),
        ({"ignore": ["messages"]}, "'messages' can't be ignored"),
        ({"structured": "mask"}, "structured = 'mask': it must be one of refuse, check"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(
    task: Path, args: dict, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(task)
    with pytest.raises(BadEnvironment) as raised:
        check_environment(configuration(task, **args))
    assert message in str(raised.value)


def test_a_resume_notices_other_problems_and_another_reward(task: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(task)

    def identity(**args: Any) -> str:
        config = configuration(task, **{"command": [sys.executable, "my_agent.py"], **args})
        environment: Any = check_environment(config)
        assert environment.agent_command[1] == str(task / "my_agent.py")
        return environment.identity

    before = identity()
    assert identity() == before
    assert identity(reward="file") != before
    (task / "problems.jsonl").write_text(json.dumps(ROWS[0]))
    assert identity() != before


@draws.seldom
def test_the_example_in_the_docs_is_an_agent(task: Path):
    """With OpenAI's client, and its own tool."""
    section = (REPOSITORY / "docs" / "how-to" / "agents.md").read_text()
    script = section.partition("```python\n")[2].partition("```")[0]
    (task / "my_agent.py").write_text(script)
    (task / "problems.jsonl").write_text('{"question": "What is 2 + 3?", "answer": "5"}\n' * 3)
    group = work(task, command=["{python}", str(task / "my_agent.py")], reward="file")
    assert group.usable
    assert {len(rollout.turns) for rollout in group.rollouts} <= {1, 2, 3}
    assert set(group.rollouts[0].parts) == {"right", "tries"}


def test_what_an_earlier_process_has_left_is_removed_and_no_folder_of_this_one(
    task: Path, monkeypatch: pytest.MonkeyPatch
):
    """Rollouts that go on begin at the same time, with the very names that their folders had before."""
    config = configuration(task)
    environment = AgentPrograms(make_environment(config.environment), config)
    folder = task / "run" / "agents"
    for name in ("0-a", "0-b"):
        (folder / name / "left").mkdir(parents=True)
    rmtree, made = shutil.rmtree, list[Path]()

    def slow(path: Path, **how: Any) -> None:
        """The other rollouts begin while the first one removes what is left."""
        if not made:
            made.append(folder / "0-b")
            assert environment._make_folder("0-b", {}) == made[0]
        rmtree(path, **how)

    monkeypatch.setattr(shutil, "rmtree", slow)
    made.append(environment._make_folder("0-a", {}))
    assert [[one.name for one in path.iterdir()] for path in made] == [["problem.json"]] * 2
    assert sorted(one.name for one in folder.iterdir()) == ["0-a", "0-b"]
    environment.close()


@pytest.mark.slow
def test_an_agent_whose_keeper_is_stopped_is_killed_with_all_that_it_has_started(task: Path):
    """Whoever must kill may be stopped itself: then somebody stands behind it."""
    started = task / "started"
    script = (
        "import os, signal, subprocess, sys, time\n"
        "one = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(started)!r} + '_', 'w').write(f'{{os.getpid()}} {{one.pid}} {{os.getppid()}}')\n"
        f"os.rename({str(started)!r} + '_', {str(started)!r}); time.sleep(600)"
    )

    async def agent() -> None:
        work = agent_process.run_agent(
            [sys.executable, "-S", "-c", script], {}, task, limit=None, waited=lambda: 0.0, log=lambda _: None
        )
        running = asyncio.ensure_future(work)
        while not started.exists():
            await asyncio.sleep(0.01)
        os.kill(int(started.read_text().split()[2]), signal.SIGSTOP)
        running.cancel()
        await asyncio.wait({running})

    asyncio.run(agent())
    for pid in map(int, started.read_text().split()):
        assert not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()


def test_a_stopped_keeper_goes_on_when_its_owner_dies(task: Path):
    """It finds that the owner is gone, and ends what it has kept."""
    owner = (
        "import os, signal, subprocess, sys, time\n"
        f"kept = subprocess.Popen([sys.executable, '-I', '-S', {str(KEEPER)!r}, '0', 'kill', 'sleep', '600'],"
        " stdin=subprocess.PIPE, start_new_session=True)\n"
        "children = f'/proc/{kept.pid}/task/{kept.pid}/children'\n"
        "while not (child := open(children).read().split()): time.sleep(0.01)\n"
        "while 'sleep' not in open(f'/proc/{child[0]}/comm').read(): time.sleep(0.01)\n"
        "os.kill(kept.pid, signal.SIGSTOP)\n"
        "print(kept.pid, child[0], flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", owner], capture_output=True, text=True, timeout=60)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr

    def gone(pid: int) -> bool:
        status = Path(f"/proc/{pid}/status")
        return not status.exists() or "\nState:\tZ" in status.read_text()

    end = time.monotonic() + 60
    while not all(map(gone, pids)):
        assert time.monotonic() < end, "they are left"
        time.sleep(0.02)
