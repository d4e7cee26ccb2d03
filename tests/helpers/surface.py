"""The public surface as text: what docs/api.md lists with its signatures, the names at the top, and the flags of every command."""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

import dash_attn
from dash_attn.cli import main as command_line

ROOT = Path(__file__).parents[2]
Definition = ast.FunctionDef | ast.ClassDef


def surface() -> list[str]:
    return [*(f"dash_attn.{name}" for name in sorted(dash_attn.__all__)), *_documented(), *_commands()]


def _documented() -> list[str]:
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    return [line for name in sorted(names) for line in _lines(name, _definition(name))]


def _definition(name: str) -> Definition:
    """Read, not imported: some need libraries that are not here. A name that a room exports is defined in one of its files."""
    module, _, attribute = name.rpartition(".")
    path = ROOT / "src" / Path(*module.split("."))
    files = [path.with_suffix(".py"), *path.parent.glob("*.py")] if path.with_suffix(".py").exists() else sorted(path.rglob("*.py"))
    found = [node for file in files for node in ast.parse(file.read_text()).body if isinstance(node, Definition) and node.name == attribute]
    assert found, f"docs/api.md lists {name}, which is not defined"
    last = [node for node in found if not any(ast.unparse(x) == "overload" for x in node.decorator_list)]
    return last[0]


def _lines(name: str, node: Definition) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [f"{name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns) if node.returns else None}"]
    members = [item for item in node.body if isinstance(item, ast.FunctionDef) and (item.name == "__init__" or item.name[0] != "_")]
    fields = [f"{name}.{ast.unparse(item)}" for item in node.body if isinstance(item, ast.AnnAssign)]
    return [f"{name}({', '.join(map(ast.unparse, node.bases))})", *fields, *(_lines(f"{name}.{item.name}", item)[0] for item in members)]


def _commands() -> list[str]:
    parser = command_line._parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return [f"dash-attn {name} {_flag(action)}" for name, command in sorted(commands.choices.items()) for action in command._actions]


def _flag(action: argparse.Action) -> str:
    name = "/".join(action.option_strings) or action.dest.upper()
    value = f" {action.metavar or action.dest.upper()}" if action.option_strings and action.nargs != 0 else ""
    return f"{name}{value}{' {' + ','.join(map(str, action.choices)) + '}' if action.choices else ''}"
