"""Which counter a forward takes its tickets from, without a GPU."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

tickets = import_module("dash_attn.backends.hopper.driver.stream_counters")


@pytest.fixture(autouse=True)
def counters(monkeypatch: pytest.MonkeyPatch) -> dict[int, torch.Tensor]:
    found = {device: torch.zeros(tickets.MOST_STREAMS, dtype=torch.int32) for device in (0, 1)}
    monkeypatch.setattr(tickets, "_counters", found)
    monkeypatch.setattr(tickets, "_slots", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def test_a_stream_keeps_its_counter_and_shares_it_with_no_other(counters: dict[int, torch.Tensor]) -> None:
    streams = [(device, stream) for device in (0, 1) for stream in (0, 16, 4096)]
    addresses = [tickets.shared_counter(*stream) for stream in streams]
    assert len(set(addresses)) == len(streams)
    assert addresses == [tickets.shared_counter(*stream) for stream in streams]
    for (device, _), address in zip(streams, addresses, strict=True):
        first = counters[device].data_ptr()
        assert first <= address < first + 4 * tickets.MOST_STREAMS


def test_graphs_and_the_per_thread_stream_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tickets.shared_counter(0, tickets.PER_THREAD_STREAM) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tickets.shared_counter(0, 0) is None


def test_more_streams_than_counters() -> None:
    found = [tickets.shared_counter(0, 16 * stream + 16) for stream in range(tickets.MOST_STREAMS + 3)]
    assert found[-3:] == [None] * 3
    assert None not in found[:-3]
    assert tickets.shared_counter(0, 16) == found[0]
