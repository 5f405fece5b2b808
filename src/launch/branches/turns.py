"""`rl --branch`: branches of one run take turns at the same servers, and the rule keeps the best of them.

Each branch is a run of its own, in a folder of its own. A turn takes its steps up to one that depends on the
settings alone, and ends with a checkpoint. What was decided is in `branches.json` before anything follows
from it. So whatever is killed, the same command with `--ckpt.resume auto` does what is left to do.
"""

import functools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, load_manifest
from cairn.config.branches import KeepRule
from cairn.config.rl import RLConfig
from cairn.launch.branches.children import BranchServers, BranchTurn
from cairn.launch.branches.settings import (
    GOES_ON,
    SharedByBranches,
    at_servers,
    check,
    of_branch,
    planned,
    refuse,
    refuse_shared_gpus,
    shared_by,
    store_of,
)
from cairn.launch.plan.dry_run import explain, settled
from cairn.run.branches import Branches, BranchStates
from cairn.run.directory import RunDirectory
from cairn.run.errors import CairnError, UsageError
from cairn.run.exits import EXIT_STOPPED, EXIT_USAGE
from cairn.run.files import make_folders, write_atomic
from cairn.run.locked_folder import lock
from cairn.run.object_store import is_url
from cairn.run.output import outlive_terminal
from cairn.run.signals import on_stop_signals, say

POLL_SECONDS = 0.1
LOOK_SECONDS = 0.5
"""Between two looks at whether the user has ended a branch."""
LOST_SAVES = 3
"""How often in a row a branch's turn may end without its last step, as a process died in the save."""


def stops(since: int, max_steps: int, turn_steps: int, rules: Sequence[KeepRule]) -> list[int]:
    """The steps after which branches stop: at the end of turns, where the rule chooses, and at the end."""
    return sorted(
        {*range(since + turn_steps, max_steps, turn_steps), *(one.step for one in rules), max_steps}
    )


def next_goal(steps: Mapping[str, int], at: Sequence[int]) -> tuple[int, list[str]] | None:
    """The step that branches go to next, and those that have not reached it; None if all are at the end.

    Args:
        steps: the newest checkpoint of each branch that goes on, in order.
        at: where they stop.
    """
    behind = min(steps.values())
    goal = next((stop for stop in at if stop > behind), None)
    return None if goal is None else (goal, [name for name, step in steps.items() if step < goal])


def run_branches(config: RLConfig, each: Mapping[str, RLConfig]) -> int:
    """Run all branches to their ends; returns the exit code.

    Args:
        config: the settings that all branches have in common.
        each: those of each branch, by its name.

    Raises:
        UsageError: they can't start like this; nothing was started.
        CairnError: a branch or a server failed.
    """
    refuse(config, each)
    branches = Branches(config.output_dir)
    states = begun(config, list(each), branches)
    if config.dry_run:
        return _show(config, each, branches, states)
    shared = shared_by(config, each, states.start, min(config.branches.at_once, len(each)))
    scheduler = BranchScheduler(config, each, branches, shared)
    scheduler.check(states)
    outlive_terminal()
    make_folders(branches.path)
    run = RunDirectory(branches.path)
    lock(run)
    try:
        run.forget_stop()
        if branches.exists():
            branches.record(lambda _: begun(config, list(each), branches))
        else:
            branches.begin(states)
        with BranchServers(branches, shared.servers, config) as servers:
            return scheduler.run(servers)
    finally:
        run.unlock()


def begun(config: RLConfig, names: list[str], branches: Branches) -> BranchStates:
    """What is on record of the branches, by the rule of now, or what is to be of new ones; writes nothing.

    Raises:
        UsageError: other branches, or a run, are in the folder, or the user did not say that these go on.
    """
    rule, resume, where = (
        config.branches,
        config.ckpt and config.ckpt.resume,
        f"--output-dir {config.output_dir}",
    )
    if branches.exists():
        states = branches.states()
        if resume not in GOES_ON:
            raise UsageError(
                f"{where}: there are the branches {', '.join(states.names)}; go on with --ckpt.resume auto, "
                "or give another --output-dir"
            )
        if states.names != names:
            raise UsageError(
                f"{where}: there are the branches {', '.join(states.names)}, and the command has "
                f"{', '.join(names)}; give the same ones in the same order, or another --output-dir "
                f"(cairn branches {config.output_dir} --end NAME ends one)"
            )
        return replace(
            states, metric=rule.metric, mode=rule.mode, window=rule.window, max_steps=config.max_steps
        )
    if RunDirectory(branches.path).exists():
        raise UsageError(f"{where}: is the folder of a run, which has no branches; give another --output-dir")
    if resume == "latest":
        raise UsageError(f"--ckpt.resume latest: {where} has no branches; --ckpt.resume auto begins them")
    start, since = None if resume == "auto" else resume, 0
    if start is not None and is_url(start):
        raise UsageError(f"--ckpt.resume {start}: branches start from a local step; ckpt copy fetches one")
    try:
        since = load_manifest(Path(start)).step if start else 0
    except CheckpointError as error:
        raise UsageError(f"--ckpt.resume {start}: {error}") from None
    for one in rule.rules:
        if one.step <= since:
            raise UsageError(
                f"--branches.keep {one.step}:{one.count}: the branches start from step {since}; give a later "
                "step"
            )
    return BranchStates(names, rule.metric, rule.mode, rule.window, config.max_steps, start, since)


def _show(config: RLConfig, each: Mapping[str, RLConfig], branches: Branches, states: BranchStates) -> int:
    """Print the settings of each branch as one JSON object, and what they mean; returns the exit code."""
    at = stops(states.since, config.max_steps, config.branches.turn_steps, config.branches.rules)
    shared = SharedByBranches({}, config.orchestrator.inference_url, None)
    codes, settings = list[int](), dict[str, Any]()
    for name, own in each.items():
        where = f"branch {name}, in {branches.run(name)}, stops after steps {', '.join(map(str, at))}"
        print(f"{where}:", file=sys.stderr, flush=True)
        plan = planned(of_branch(name, own, branches, shared, states))
        settings[name] = json.loads(settled(plan).model_dump_json())
        codes.append(explain(plan))
    print(json.dumps({"branch": settings}, indent=2), flush=True)
    return max(codes)


class BranchScheduler:
    """Which branch takes which steps when; it holds nothing that is not on record."""

    def __init__(
        self, config: RLConfig, each: Mapping[str, RLConfig], branches: Branches, shared: SharedByBranches
    ):
        self.config = config
        self.each = each
        self.branches = branches
        self.shared = shared
        self._stopping: str | None = None
        """Why the command is to stop, if it is."""
        self._at_once = False
        self._lost = dict.fromkeys(each, 0)
        """How often in a row a turn of each branch has ended without its last step."""

    def settings(self, name: str, states: BranchStates) -> RLConfig:
        """Those by which a branch goes on, also by itself."""
        return of_branch(name, self.each[name], self.branches, self.shared, states)

    def step(self, name: str, states: BranchStates) -> int:
        """The newest checkpoint of a branch, or the step that it starts from."""
        return store_of(name, self.each[name], self.branches).latest() or states.since

    def check(self, states: BranchStates) -> None:
        """See that each branch that goes on could start; nothing is started.

        Raises:
            UsageError: one could not.
        """
        plans = {
            name: check(name, at_servers(self.settings(name, states), self.shared.urls))
            for name in states.going_on
        }
        if self.config.branches.at_once > 1:
            refuse_shared_gpus(plans)

    def run(self, servers: BranchServers) -> int:
        """Have the branches take their turns until all that go on are at their last step.

        Raises:
            CairnError: a branch or a server failed.
        """
        with on_stop_signals(self._stop, self._hurry):
            while not servers.are_ready and not self._stopping:
                servers.look_after(lambda: 0)
                time.sleep(POLL_SECONDS)
            while not self._stopping:
                states = self._chosen(self.branches.states())
                steps = {name: self.step(name, states) for name in states.going_on}
                rule, at_once = self.config.branches, min(self.config.branches.at_once, len(steps))
                # Where all that are left run side by side, none waits for its turn.
                turn = self.config.max_steps if at_once == len(steps) else rule.turn_steps
                rules = rule.rules if len(steps) > 1 else []
                found = next_goal(steps, stops(states.since, self.config.max_steps, turn, rules))
                if found is None:
                    self._say_results(states)
                    return 0
                goal, behind = found
                self._take(behind, goal, servers, at_once)
        print(f"stopped ({self._stopping}); the same command goes on with --ckpt.resume auto", flush=True)
        return EXIT_STOPPED

    def _chosen(self, states: BranchStates) -> BranchStates:
        """What is on record once the rule has chosen wherever all branches have come to."""
        for rule in self.config.branches.rules:
            if min(self.step(name, states) for name in states.going_on) < rule.step:
                break
            if all(choice.step != rule.step for choice in states.choices):
                states = self.branches.choose(rule.step, rule.count)
                print(f"after step {rule.step} these go on: {', '.join(states.going_on)}", flush=True)
        return states

    def _say_results(self, states: BranchStates) -> None:
        self._stop_ended()
        for name in states.names:
            end, where = states.ended.get(name), self.branches.run(name)
            how = f"is done: step {self.step(name, states)}" if end is None else f"ended: {end.reason}"
            print(f"branch {name} {how}; it is in {where}", flush=True)

    # Turns

    def _take(self, names: Sequence[str], goal: int, servers: BranchServers, at_once: int) -> None:
        """Have branches take their steps up to `goal`, some at a time, or as far as they come until a stop.

        Raises:
            CairnError: a branch or a server failed.
        """
        waiting, turns, looked = list(names), list[BranchTurn](), 0.0
        asked, hurried = set[str](), set[str]()
        try:
            while turns or (waiting and not self._stopping):
                while waiting and len(turns) < at_once and not self._stopping:
                    turns += self._begin(waiting.pop(0), goal)
                for turn in [turn for turn in turns if turn.exit_code is not None]:
                    turns.remove(turn)
                    self._conclude(turn)
                servers.look_after(lambda: max(map(self.branches.step, names)))
                if time.monotonic() - looked > LOOK_SECONDS:
                    looked = time.monotonic()
                    self._stop_ended()
                for turn in turns if self._stopping else ():
                    if turn.name not in asked:
                        asked.add(turn.name)
                        RunDirectory(self.branches.run(turn.name)).end_with(RunDirectory(self.branches.path))
                        turn.ask_to_stop()
                    elif self._at_once and turn.name not in hurried:
                        hurried.add(turn.name)
                        turn.ask_to_stop()
                time.sleep(POLL_SECONDS)
        finally:
            for turn in turns:
                turn.kill()

    def _begin(self, name: str, goal: int) -> list[BranchTurn]:
        """Start a branch's turn, unless the user has ended the branch meanwhile."""
        states = self.branches.states()
        if name in states.ended:
            return []
        settings = self.branches.settings(name)
        make_folders(settings.parent)
        content = self.settings(name, states).model_dump_json(indent=2)
        write_atomic(settings, content.encode(), durable=True)
        print(f"branch {name}: steps {self.step(name, states) + 1} to {goal}", flush=True)
        say = functools.partial(print, flush=True)
        return [BranchTurn(self.branches, name, goal, self.shared.urls, say)]

    def _conclude(self, turn: BranchTurn) -> None:
        """Find out how a turn has ended; one that a signal to one of its processes has stopped stops all.

        Raises:
            CairnError: it failed.
        """
        code, name, states = turn.exit_code, turn.name, self.branches.states()
        if code in (0, EXIT_STOPPED) and (name in states.ended or self.step(name, states) >= turn.step):
            self._lost[name] = 0
            return
        if code == EXIT_STOPPED and self._stopping is None:
            reason = RunDirectory(self.branches.run(name)).stop_requested() or "it was asked to"
            self._lost[name] += 1
            if reason != f"--stop-after {turn.step}":
                self._stopping = f"branch {name} has stopped: {reason}"
            elif self._lost[name] > LOST_SAVES:
                raise CairnError(
                    f"branch {name}: step {turn.step} could not be saved, {LOST_SAVES} times in a row"
                )
        if code not in (0, EXIT_STOPPED) and not self._at_once:
            kind = UsageError if code == EXIT_USAGE else CairnError
            raise kind(
                f"branch {name} failed (exit code {code}); it says why above. Mend that and go on with "
                f"--ckpt.resume auto, or end the branch: cairn branches {self.branches.path} --end {name}"
            )
        if code == 0:
            raise CairnError(
                f"branch {name} ended before step {turn.step}, at step {self.step(name, states)}"
            )

    def _stop_ended(self) -> None:
        """Ask the branches to stop that have ended; an attempt that begins forgets what was asked before.

        Of those that are not at work, the run directory says from then on why it goes no further.
        """
        for name, end in self.branches.states().ended.items():
            run, reason = RunDirectory(self.branches.run(name)), f"the branch ends: {end.reason}"
            if run.exists() and run.stop_requested() != reason:
                run.request_stop(reason)

    def _stop(self, name: str) -> None:
        """A signal has come."""
        self._stopping = name
        say(f"{name}: each branch that is at work stops at the next step boundary")

    def _hurry(self) -> None:
        self._at_once = True
