"""Memory that outlives a call is not asked for by the thread whose allocations go to the pool of a CUDA graph."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from dash_attn.backends.kept import lasting

CUDA = torch.device("cuda", 0)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """The current stream of each thread, as PyTorch has them."""
    current = {threading.get_ident(): "the caller's"}

    @contextmanager
    def on(stream: str) -> Iterator[None]:
        current[threading.get_ident()] = stream
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[threading.get_ident()])
    monkeypatch.setattr(torch.cuda, "stream", on)
    return current


def test_another_thread_asks_on_the_same_stream(streams: dict[int, str]) -> None:
    thread, stream = lasting(lambda: (threading.get_ident(), streams[threading.get_ident()]), CUDA)
    assert thread != threading.get_ident()
    assert stream == "the caller's"


def test_on_a_cpu_nothing_is_moved() -> None:
    assert lasting(threading.get_ident, torch.device("cpu")) == threading.get_ident()


def test_errors_reach_the_caller(streams: dict[int, str]) -> None:
    def fail() -> None:
        raise MemoryError("full")

    with pytest.raises(MemoryError, match="full"):
        lasting(fail, CUDA)
