"""What calls come back to: the values used last stay, and those of a captured graph stay for good."""

from __future__ import annotations

import pytest
import torch

from dash_attn.backends.kept import Kept


@pytest.fixture(autouse=True)
def no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch without CUDA cannot be asked."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def kept(*keys: str, most: int = 3) -> Kept[str]:
    made: Kept[str] = Kept(most)
    for key in keys:
        made.put(key, key.upper())
    return made


def test_the_one_that_was_not_used_for_longest_goes() -> None:
    values = kept("a", "b", "c")
    assert values.get("a") == "A"
    assert values.put("d", "D") == ["B"]
    assert [values.get(key) for key in "abcd"] == ["A", None, "C", "D"]


def test_nothing_goes_while_there_is_room() -> None:
    assert kept("a", "b").put("c", "C") == []


def test_a_captured_graph_keeps_what_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    values = kept("a", most=1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert values.get("a") == "A"
    assert values.get("b") is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert values.put("b", "B") == ["A"]
    assert values.in_graphs == ["A"], "gone from the values that calls find, and still alive"


def test_clear_forgets_what_calls_find() -> None:
    values = kept("a", "b")
    values.clear()
    assert values.get("a") is None
