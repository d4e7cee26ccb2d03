"""The page docs/errors.md: every misuse with the error it gets, by making the call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

import dash_attn
from dash_attn import distributed
from dash_attn.integrations import huggingface, megatron
from dash_attn.integrations.sdpa import scaled_dot_product_attention
from misuse import ACCEPTED, MISUSE, PREPARATION
from page_parts import code, table


class Outcome(NamedTuple):
    error: str  # name of the exception
    message: str


def namespace() -> dict[str, Any]:
    names: dict[str, Any] = {name: getattr(dash_attn, name) for name in dash_attn.__all__}
    names |= {"torch": torch, "huggingface": huggingface, "scaled_dot_product_attention": scaled_dot_product_attention}
    names |= {"SimpleNamespace": SimpleNamespace, "DashCoreAttention": megatron.DashCoreAttention, "megatron": megatron}
    names |= {name: getattr(distributed, name) for name in distributed.__all__}
    exec(PREPARATION, names)
    return names


def outcome(call: str) -> Outcome | None:
    """What the call raises; None if it raises nothing."""
    try:
        exec(call, namespace())
    except Exception as error:
        return Outcome(type(error).__name__, str(error))
    return None


def value(expression: str) -> str:
    return str(eval(expression, namespace()))


def page() -> str:
    lines = [
        "# Errors and what to do",
        "",
        "Every call below is made when this page is written (`make pages`), and a test fails when a message changes.",
        "All run on the CPU, on these tensors:",
        *("", "```python", *PREPARATION.strip().splitlines(), "```", ""),
        "Messages say what was asked and what is allowed. Refusals of a backend are `ValueError`s, of a schedule `ScheduleError`s.",
    ]
    for title, cases in MISUSE.items():
        rows = []
        for call, remedy in cases:
            found = outcome(call)
            assert found is not None, f"{call} raises nothing"
            rows.append([code(call), f"{found.error}: {' '.join(found.message.split())}", remedy])
        lines += ["", f"## {title}", "", *table(["call", "error", "instead"], rows)]
    lines += ["", "## Not errors", "", "What is empty has an answer.", ""]
    lines += table(["expression", "value"], [[code(expression), code(value(expression))] for expression in ACCEPTED])
    return "\n".join(lines) + "\n"
