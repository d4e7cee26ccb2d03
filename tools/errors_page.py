"""The page docs/errors.md: calls that are mistakes, each with the error it gets and what to do instead.

Calls and remedies are written by hand, in the page. Here every call is made again, and what it raises, or returns, filled in.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

import dash_attn
from dash_attn import distributed, scheduling
from dash_attn.integrations import huggingface, megatron
from dash_attn.integrations.sdpa import scaled_dot_product_attention
from page_parts import cells, code, row

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"


def namespace() -> dict[str, Any]:
    """What calls find: our names, and what the first block of code on the page prepares."""
    names: dict[str, Any] = {name: getattr(dash_attn, name) for name in dash_attn.__all__}
    names |= {"torch": torch, "huggingface": huggingface, "scaled_dot_product_attention": scaled_dot_product_attention}
    names |= {"SimpleNamespace": SimpleNamespace, "patch": patch, "DashCoreAttention": megatron.DashCoreAttention, "megatron": megatron}
    names |= {name: getattr(room, name) for room in (distributed, scheduling) for name in room.__all__}
    exec(PAGE.read_text(encoding="utf-8").split("```")[1].removeprefix("python"), names)
    return names


def outcome(call: str) -> Exception | None:
    """What the call raises; None if it raises nothing."""
    try:
        exec(call, namespace())
    except Exception as error:
        return error
    return None


def mistakes() -> list[str]:
    """The calls of the page that raise."""
    found = map(cells, PAGE.read_text(encoding="utf-8").splitlines())
    return [_code_of(entry) for entry in found if len(entry) == 3 and _code_of(entry)]


def _code_of(entry: list[str]) -> str:
    """Of a row of a table: what stands in backquotes in its first cell, or nothing."""
    found = re.fullmatch(r"(`+) ?(.*?) ?\1", entry[0]) if entry else None
    return found[2] if found else ""


def page() -> str:
    return "".join(f"{_filled(line)}\n" for line in PAGE.read_text(encoding="utf-8").splitlines())


def _filled(line: str) -> str:
    entry = cells(line)
    call = _code_of(entry)
    if not call:
        return line
    if len(entry) == 2:
        return row([entry[0], code(str(eval(call, namespace())))])
    found = outcome(call)
    assert found is not None, f"{call} raises nothing"
    return row([entry[0], f"{type(found).__name__}: {' '.join(str(found).split())}", entry[2]])
