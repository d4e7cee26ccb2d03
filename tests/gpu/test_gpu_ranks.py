"""Sums over micro-batches on a GPU that several ranks share. NCCL refuses two ranks on one GPU, so gloo carries the messages."""

from __future__ import annotations

import pytest

import tree_workers
from processes import run_processes
from tree_models import bits, mean_by_definition
from tree_workers import MODELS

pytestmark = pytest.mark.gpu


def test_every_number_of_ranks_has_the_mean_by_definition() -> None:
    found = run_processes(tree_workers.means_on_one_gpu, 4)
    for name, count, ranks in found[0]:
        expected = bits(mean_by_definition(MODELS[name]().cuda(), count).values())
        assert [found[rank][name, count, ranks] for rank in range(ranks)] == [expected] * ranks
    assert len(found[0]) == 18
