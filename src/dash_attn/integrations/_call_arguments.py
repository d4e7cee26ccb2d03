"""What the layers of transformers' models pass to an attention function beside its named arguments."""

from __future__ import annotations

from typing import Any

from ._documents import PLACES

USED = ("position_ids", *PLACES)
# Known to say nothing about which keys are attended, or how; each with the reason.
WITHOUT_EFFECT: dict[str, str] = {}
# These only when they ask for nothing.
ONLY_FALSE = ("output_attentions",)


def refuse_unknown(arguments: dict[str, Any], layer: str) -> None:
    """Raise for an argument that nothing here is known about: it may choose what is attended."""
    known = (*USED, *WITHOUT_EFFECT)
    unknown = [name for name, value in arguments.items() if value is not None and name not in known and (name not in ONLY_FALSE or value)]
    if unknown:
        raise ValueError(f"dash_attn does not support {', '.join(f'{name}={_short(arguments[name])}' for name in unknown)}, which {layer} asks for")


def _short(value: Any) -> str:
    return str(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__
