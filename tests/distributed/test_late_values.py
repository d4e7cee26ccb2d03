"""Values that come to the hosts of ranks whenever they come: what differs is found at one call by all, and nobody waits."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from dash_attn.distributed.hosts import NAMES, LateValues

RANKS = 3
Given = tuple[Tensor | None, ...]


class Copy:
    """Comes after so many questions."""

    def __init__(self, questions: int) -> None:
        self.questions = questions

    def query(self) -> bool:
        self.questions -= 1
        return self.questions < 0


class Rank(LateValues):
    def keep_late(self, call: int, given: Given, questions: int) -> None:
        """What `keep` does on a GPU."""
        self._coming.append((call, Copy(questions), list(given)))


def values(sink: float = 1.0, seed: int = 7) -> Given:
    return torch.tensor([0.5, sink]).bfloat16(), torch.tensor([seed]), None


def message(ranks: list[Rank]) -> set[str]:
    """What the ranks raise at one call: the same, or nothing."""
    rows, said = [rank.tell() for rank in ranks], set()
    for rank in ranks:
        try:
            rank.hear(rows)
        except RuntimeError as error:
            said.add(str(error))
        else:
            said.add("")
    assert len(said) == 1, "all ranks raise, or none"
    return said - {""}


@pytest.mark.parametrize("seed", range(20))
def test_equal_values_never_raise(seed: int) -> None:
    source, ranks = random.Random(seed), [Rank() for _ in range(RANKS)]
    for call in range(1, 60):
        if call % 3:  # calls between have no values
            for rank in ranks:
                rank.keep_late(call, values(sink=float(call)), source.randrange(4))
        assert not message(ranks)
    assert all(len(rank._hashes) < 30 for rank in ranks)  # what was compared is forgotten


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("name", "odd"), [(NAMES[0], {"sink": 1.5}), (NAMES[1], {"seed": 8})])
def test_values_that_differ_are_found_whenever_they_come(seed: int, name: str, odd: dict[str, float]) -> None:
    source, ranks = random.Random(seed), [Rank() for _ in range(RANKS)]
    wrong, raised = source.randrange(1, 8), []
    for call in range(1, 40):
        for place, rank in enumerate(ranks):
            rank.keep_late(call, values(**odd) if place == 2 and call == wrong else values(), source.randrange(4))  # type: ignore[arg-type]
        raised += [(call, words) for words in message(ranks)]
    ((call, words),) = raised  # once: what follows is right, and does not raise
    assert call > wrong
    assert f"rank 0 and rank 2 differ in the values of {name}, in a call up to number " in words
    assert int(words.split("number ")[1].split(" ")[0]) >= wrong


def test_values_on_the_host_are_left_to_the_call() -> None:
    rank = Rank()
    rank.keep(1, values())
    assert not rank._coming
