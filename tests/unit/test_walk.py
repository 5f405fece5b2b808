"""How far a command's settings travel from `main` to a started role, read from the sources as a reader would.

The walk follows the settings through calls: it enters each function that gets them, or what was made of them,
as an argument, in the order of the code. Where a table or an object chooses what is called, it ends: that is
what the table of `launch/plan/steps.py` is for. Every function that rewrites the settings on the way to a
role, and is called by its name, is a room that a reader must visit.
"""

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from test_imports import FLOORS, modules, room

from cairn.run.extensions import syntax_tree

ROOMS, CLIMBS, RETURNS = 47, 17, 36
"""What was reached; before there was a plan, it was 118, 63 and 122."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Walk:
    """stays: the modules of the functions that were entered, in order, without repetitions in a row."""

    stays: list[str] = field(default_factory=list[str])
    entered: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])

    def __post_init__(self) -> None:
        self.files = modules()
        self.trees: dict[str, ast.Module] = {}

    def statements(self, module: str) -> list[ast.stmt]:
        """What a module of the package consists of; nothing of other packages."""
        if module not in self.trees:
            text = self.files[module].read_text() if module in self.files else ""
            self.trees[module] = syntax_tree(text)
        return self.trees[module].body

    def follow(self, module: str, name: str, tracked: set[str] | None = None) -> None:
        """Enter a function, if it is not known yet; `tracked`: its parameters that hold settings."""
        found = self.defined(module, name)
        if found is None or (found[0], name) in self.entered:
            return
        module, function = found
        self.entered.add((module, name))
        if not self.stays or self.stays[-1] != module:
            self.stays.append(module)
        known = set(tracked or ())
        for node in in_order(function):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.For) and (
                mentions(node.iter if isinstance(node, ast.For) else node.value, known)
            ):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                known |= {
                    one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)
                }
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                self.call(module, function, node, known)

    def call(self, module: str, function: Function, node: ast.Call, known: set[str]) -> None:
        assert isinstance(node.func, ast.Name)
        given = {i for i, value in enumerate(node.args) if mentions(value, known)}
        named = {one.arg for one in node.keywords if one.arg and mentions(one.value, known)}
        target = self.imported(module, function, node.func.id)
        if (given or named) and target is not None:
            found = self.defined(*target)
            names = parameters(found[1]) if found else []
            self.follow(*target, {name for i, name in enumerate(names) if i in given} | named)

    def defined(self, module: str, name: str) -> tuple[str, Function] | None:
        """The function of that name, or the constructor of the class; packages hand on what they import."""
        for node in self.statements(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return module, node
            if isinstance(node, ast.ClassDef) and node.name == name:
                inits = [
                    one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"
                ]
                return (module, inits[0]) if inits else None
            if isinstance(node, ast.ImportFrom) and any(
                (one.asname or one.name) == name for one in node.names
            ):
                return self.defined(str(node.module), name)
        return None

    def imported(self, module: str, function: Function, name: str) -> tuple[str, str] | None:
        for node in (*ast.walk(function), *self.statements(module)):
            if isinstance(node, Function) and node is not function and node.name == name:
                return module, name
            if isinstance(node, ast.ClassDef) and node.name == name:
                return module, name
            if isinstance(node, ast.ImportFrom):
                for one in node.names:
                    if (one.asname or one.name) == name:
                        return str(node.module), one.name
        return None

    @property
    def counts(self) -> tuple[int, int, int]:
        """Rooms, climbs to a higher floor, and returns to a room that was left."""
        floor = {name: number for number, names in enumerate(FLOORS) for name in names}
        floors = [floor[room(module)] for module in self.stays]
        climbs = sum(after < before for before, after in itertools.pairwise(floors))
        rooms = len(set(self.stays))
        return rooms, climbs, len(self.stays) - rooms


def in_order(function: Function) -> Iterator[ast.AST]:
    """All nodes in the order in which they are written, arguments of a call before the call."""

    def visit(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            yield from visit(child)
        yield node

    for statement in function.body:
        yield from visit(statement)


def mentions(node: ast.AST | None, names: set[str]) -> bool:
    return node is not None and any(isinstance(one, ast.Name) and one.id in names for one in ast.walk(node))


def parameters(function: Function) -> list[str]:
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    return names[1:] if names[:1] == ["self"] else names


def walk(module: str, name: str, *tracked: str) -> Walk:
    found = Walk()
    found.follow(module, name, {*tracked})
    return found


def test_settings_travel_a_short_way_from_main_to_a_started_role():
    found = walk("cairn.launch.main", "_start", "command", "config")
    assert "cairn.launch.supervisor" in found.stays, "the walk arrives"
    assert "cairn.launch.plan.run_plan" in found.stays
    rooms, climbs, returns = found.counts
    assert rooms <= ROOMS, found.stays
    assert climbs <= CLIMBS, found.stays
    assert returns <= RETURNS, found.stays


def test_functions_that_get_the_settings_are_visited_in_their_order():
    """So that the bounds above hold something."""
    found = walk("cairn.launch.plan.settings", "with_ratings", "config")
    assert found.stays == ["cairn.launch.plan.settings"]
    assert {name for _, name in found.entered} == {"with_ratings", "_check_validation", "_check_both"}
    found = walk("cairn.launch.plan.settings", "with_steps", "kind", "config", "say")
    assert found.stays[:2] == ["cairn.launch.plan.settings", "cairn.run.data_sets"]
    assert found.counts[0] < len(found.stays)
