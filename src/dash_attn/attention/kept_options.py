"""Options that are kept for later calls: checked when they are given, and with a schedule as text, which traced programs also take."""

from typing import Any

from torch import Tensor

from ..call.options import Choices, check_options, in_words, options_for, text_of
from ..masks import BooleanMask, Full


def kept_options(options: dict[str, Any], dropout_p: float = 0.0) -> dict[str, Any]:
    """Keyword arguments of flash_attn_func, in which a Schedule is its JSON text. What it would refuse whatever the tensors are raises.

    dropout_p comes apart from the options: some of them refuse any dropout, and a model that is not in training has none.
    """
    kept = {**options, "schedule": text_of(options["schedule"])} if "schedule" in options else options
    choices = {name: value for name, value in kept.items() if name in Choices._fields}
    if isinstance(choices.get("mask"), (Tensor, BooleanMask)):
        choices["mask"] = Full()  # a matrix is looked at with the tensors that it is for
    chosen = Choices(**choices)
    check_options(chosen._replace(dropout_p=dropout_p), deterministic=kept.get("deterministic", False))
    options_for(chosen, head_dim=1)
    return kept


def options_in_words(options: dict[str, Any]) -> str:
    """name=value, name=value; a schedule that was given by its name."""
    schedule = options.get("schedule")
    shown = {**options, "schedule": in_words(schedule)} if isinstance(schedule, str) else options
    return ", ".join(f"{name}={value!r}" for name, value in shown.items())
