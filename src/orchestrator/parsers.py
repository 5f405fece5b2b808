"""The names of vLLM's parsers of tool calls and reasoning, known without importing vLLM."""

import ast
import importlib.util
from pathlib import Path

from cairn.config.orchestrator import OrchestratorConfig
from cairn.run.errors import UsageError

TABLES = {
    "tool_parser": ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning_parser": ("reasoning", "_REASONING_PARSERS_TO_REGISTER"),
}
"""For each setting, the package of vLLM that has the parsers, and its table of their names."""


def check_parsers(config: OrchestratorConfig) -> None:
    """Check the names of the configured parsers before any process starts.

    Importing vLLM takes several seconds and most of a gigabyte, so its table of names is read from its
    source. If vLLM has no such table, the orchestrator's `VllmParser` finds out.

    Raises:
        UsageError: vLLM has no parser of that name.
    """
    for setting in TABLES:
        name, names = getattr(config, setting), None
        if name is not None:
            names = parser_names(setting)
        if names is not None and name not in names:
            known = ", ".join(sorted(names))
            raise UsageError(f"orchestrator.{setting} = {name!r}: vLLM has no such parser; it has {known}")


def parser_names(setting: str) -> set[str] | None:
    """The names that vLLM has for `tool_parser` or `reasoning_parser`; None if they can't be read."""
    package, table = TABLES[setting]
    vllm = importlib.util.find_spec("vllm")
    for folder in (vllm and vllm.submodule_search_locations) or ():
        try:
            tree = ast.parse((Path(folder) / package / "__init__.py").read_text())
        except (OSError, SyntaxError):
            continue
        for node in tree.body:
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
                continue
            if ast.unparse(node.targets[0]) == table:
                keys = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
                return {key for key in keys if isinstance(key, str)}
    return None
