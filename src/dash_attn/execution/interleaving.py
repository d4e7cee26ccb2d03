"""Which chain moves next while a plan runs on the CPU: chosen for a block of code, so that tests can try every order of arrival."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

from ..masks import is_whole
from ..scheduling.problem import Task


class TaskTime(NamedTuple):
    """When a task ran, in seconds of one clock."""

    worker: int
    task: Task
    compute_start: float
    compute_end: float
    reduce_start: float
    reduce_end: float


@dataclass(frozen=True)
class Interleaving:
    """Which chain moves next: the oldest that can (seed None), or a random one. Threads sleep at random instead."""

    seed: int | None = None
    threads: bool = False
    workers: int | None = None  # None: as many as the backend plans for
    record: list[TaskTime] | None = field(default=None, compare=False)  # threads note there when every task ran

    def __post_init__(self) -> None:
        if self.record is not None and not self.threads:
            raise ValueError("only threads record times: coroutines take turns on one")
        for name, value, least in (("seed", self.seed, None), ("workers", self.workers, 1)):
            if value is not None and (not is_whole(value) or (least and value < least)):
                raise ValueError(f"{name} must be None or a whole number{' >= 1' if least else ''}; got {value!r}")


_current: ContextVar[Interleaving | None] = ContextVar("interleaving", default=None)


@contextmanager
def interleaving(
    seed: int | None, threads: bool = False, workers: int | None = None, record: list[TaskTime] | None = None
) -> Iterator[Interleaving]:
    """Run the CPU backward passes inside this block under one interleaving, on `workers` workers."""
    chosen = Interleaving(seed, threads, workers, record)
    token = _current.set(chosen)
    try:
        yield chosen
    finally:
        _current.reset(token)


def current_interleaving() -> Interleaving | None:
    return _current.get()
