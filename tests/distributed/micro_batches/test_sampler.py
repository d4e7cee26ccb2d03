"""The sampler: one global order for every number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dash_attn.distributed import MicroBatchSampler
from dash_attn.distributed.micro_batches import sampler
from dash_attn.distributed.micro_batches.tree import fitting_ranks
from dash_attn.distributed.peers import Peers


def of_rank(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int, *arguments: Any, **options: Any) -> MicroBatchSampler:
    with monkeypatch.context() as patch:
        patch.setattr(sampler.Peers, "of", lambda _: Peers(None, rank, ranks))
        return MicroBatchSampler(*arguments, **options)


def global_order(monkeypatch: pytest.MonkeyPatch, ranks: int, micro_batches: int, epoch: int = 0, step: int = 0) -> list[list[list[int]]]:
    """The micro-batches of each step, put together from all ranks."""
    members = [of_rank(monkeypatch, rank, ranks, 103, 3, micro_batches) for rank in range(ranks)]
    for member in members:
        member.set_epoch(epoch, step)
    per_rank = [(list(member), len(member._owned)) for member in members]
    steps = members[0].steps - step
    return [[found for batches, owned in per_rank for found in batches[number * owned : (number + 1) * owned]] for number in range(steps)]


@pytest.mark.parametrize("micro_batches", [1, 2, 5, 6, 8])
def test_the_order_is_one_for_every_number_of_ranks(monkeypatch: pytest.MonkeyPatch, micro_batches: int) -> None:
    expected = global_order(monkeypatch, 1, micro_batches)
    assert all(global_order(monkeypatch, ranks, micro_batches) == expected for ranks in fitting_ranks(micro_batches))
    assert len(expected) == 103 // (3 * micro_batches)
    assert all(len(batch) == 3 for step in expected for batch in step)
    seen = [index for step in expected for batch in step for index in batch]
    assert len(set(seen)) == len(seen)
    assert global_order(monkeypatch, 1, micro_batches, epoch=1) != expected


def test_resuming_gives_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = global_order(monkeypatch, 1, 4, epoch=3)
    for step in (1, 5, len(whole)):
        assert global_order(monkeypatch, 2, 4, epoch=3, step=step) == whole[step:]


def test_lengths_and_repeats() -> None:
    batches = MicroBatchSampler(100, 3, 4)
    assert batches.steps == 8
    assert len(batches) == len(list(batches)) == 32
    assert list(batches) == list(batches)
    batches.set_epoch(2, 8)
    assert len(batches) == len(list(batches)) == 0
    batches.set_epoch(0)
    assert len(batches) == 32


def test_the_end_of_an_epoch_is_left_out() -> None:
    batches = MicroBatchSampler(11, 2, 2, shuffle=False)
    assert list(batches) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    shuffled = MicroBatchSampler(11, 2, 2)
    left_out = set()
    for epoch in range(3):
        shuffled.set_epoch(epoch)
        left_out.add(tuple(sorted(set(range(11)) - {index for batch in shuffled for index in batch})))
    assert len(left_out) > 1


def test_seeds_and_epochs_do_not_meet() -> None:
    """With seed + epoch they would."""
    later, other = MicroBatchSampler(50, 5, 2, seed=0), MicroBatchSampler(50, 5, 2, seed=1)
    later.set_epoch(1)
    assert list(later) != list(other)
    assert list(other) == list(MicroBatchSampler(50, 5, 2, seed=1))


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    list(MicroBatchSampler(50, 5, 2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 1])
def test_it_drives_a_data_loader(workers: int) -> None:
    batches = MicroBatchSampler(20, 2, 4)
    loaded = [batch.tolist() for (batch,) in DataLoader(TensorDataset(torch.arange(20)), batch_sampler=batches, num_workers=workers)]
    assert loaded == list(batches)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((7, 2, 4), "4 micro-batches of 2 samples, 8 in all; got 7"),
        ((0, 2, 4), "samples must be a whole number >= 1"),
        ((8, 1.5, 4), "size must be a whole number >= 1"),
        ((8, 1, 0), "micro_batches must be a whole number >= 1"),
        ((8, 1, 4, None, True, -1), "seed must be a whole number >= 0"),
    ],
)
def test_what_does_not_fit_raises(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MicroBatchSampler(*arguments)


def test_wrong_steps_and_ranks_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = MicroBatchSampler(100, 3, 4)
    with pytest.raises(ValueError, match="an epoch has 8 steps; got step 9"):
        batches.set_epoch(0, 9)
    with pytest.raises(ValueError, match="epoch must be a whole number"):
        batches.set_epoch(-1)
    with pytest.raises(TypeError, match="shuffle must be True or False"):
        MicroBatchSampler(100, 3, 4, shuffle="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="3 ranks cannot share 4"):
        of_rank(monkeypatch, 0, 3, 100, 3, 4)
