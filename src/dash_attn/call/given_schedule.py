"""A schedule that a caller gives instead of a name.

Options hold its JSON text: a value, which hashes once, and which a traced program can hold.
"""

from __future__ import annotations

from functools import lru_cache

from ..scheduling.generators import generate
from ..scheduling.problem import Problem
from ..scheduling.schedule import Schedule, fit


def text_of(schedule: str | Schedule) -> str:
    """A name or a JSON text as it is; of a Schedule its JSON text, which the schedule keeps."""
    return schedule.to_json() if isinstance(schedule, Schedule) else schedule


def is_given(schedule: str) -> bool:
    """Whether this is the JSON text of a schedule, not a name."""
    return schedule.lstrip().startswith("{")


@lru_cache(maxsize=64)
def read_given(text: str) -> Schedule:
    """Raises ValueError for whatever is wrong with it."""
    return Schedule.from_json(text)


def schedule_for(problem: Problem, schedule: str, workers: int) -> Schedule:
    """By name, or the one given. Raises ScheduleError where it does not serve the problem."""
    return fit(read_given(schedule), problem, workers) if is_given(schedule) else generate(schedule, problem, workers)


def in_words(schedule: str | Schedule) -> str:
    """For a line of text: a JSON text is long."""
    given = schedule if isinstance(schedule, Schedule) else read_given(schedule) if is_given(schedule) else None
    return str(schedule) if given is None else f"{given.name} (given)"
