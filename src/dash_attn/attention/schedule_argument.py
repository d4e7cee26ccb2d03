"""The argument `schedule` where options are kept for later calls: as text, which traced programs also take."""

from __future__ import annotations

from typing import Any

from ..call.given_schedule import in_words, text_of


def with_schedule_as_text(options: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments in which a Schedule is its JSON text."""
    return {**options, "schedule": text_of(options["schedule"])} if "schedule" in options else options


def options_in_words(options: dict[str, Any]) -> str:
    """name=value, name=value; a schedule that was given by its name."""
    shown = {**options, "schedule": _name(options["schedule"])} if "schedule" in options else options
    return ", ".join(f"{name}={value!r}" for name, value in shown.items())


def _name(schedule: Any) -> Any:
    return in_words(schedule) if isinstance(schedule, str) else schedule
