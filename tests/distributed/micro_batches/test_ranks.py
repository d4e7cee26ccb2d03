"""TreeAccumulator on real processes (gloo, CPU): the bits of one rank on any number of them; controls and faults differ."""

from __future__ import annotations

from typing import Any

import pytest

import tree_workers
from dash_attn.distributed.micro_batches.tree import fitting_ranks
from processes import Group, run_processes
from tree_models import OddModel, bits, mean_by_definition
from tree_workers import COUNTS, DDP_OPTIONS, LATE_LIMIT, MANY_RANKS, MODELS, RANKS

Found = list[dict[str, dict[Any, Any]]]
GROUP = Group(tree_workers.everything, RANKS)
ONE_DIES = Group(tree_workers.a_rank_dies, 2)


@pytest.fixture(scope="module")
def found() -> Found:
    """By rank."""
    return GROUP.found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", COUNTS)
def test_every_number_of_ranks_has_the_mean_by_definition(found: Found, name: str, count: int) -> None:
    expected = bits(mean_by_definition(MODELS[name](), count).values())
    for ranks in fitting_ranks(count):
        if ranks <= RANKS:
            assert [found[rank]["means"][name, count, ranks] for rank in range(ranks)] == [expected] * ranks


def test_all_reduce_depends_on_the_number_of_ranks(found: Found) -> None:
    """The control. Up to three micro-batches there is only one order, or almost."""
    for count in (8, 12, 16, 64):
        ways = [found[0]["all-reduce"][count, ranks] for ranks in fitting_ranks(count) if ranks <= RANKS]
        assert len(set(ways)) == len(ways) >= 3


def test_every_kind_of_group_works(found: Found) -> None:
    for rank, groups in enumerate(one["groups"] for one in found):
        assert groups["world"] == groups["mesh"] == groups["part of a mesh"] == found[0]["means"]["mlp", 8, 1]
        assert groups["mesh of two dimensions"].startswith("ValueError: group must be a mesh of one dimension; got 2 dimensions")
        if rank > 1:
            assert groups["not a member"] == f"ValueError: only members of a group may use it; this process, global rank {rank}, is none"


def test_planted_faults_are_found(found: Found) -> None:
    expected = found[0]["means"]["mlp", 8, 1]
    for outcomes in (dict(one["faults"]) for one in found):
        assert outcomes.pop("none") == outcomes.pop("none again") == expected
        assert outcomes.pop("left out") == "RuntimeError: rank 2 must add 2 of the 8 micro-batches before finish; it added 1"
        assert len({expected, *outcomes.values()}) == 5  # each fault has bits of its own


def test_disagreement_is_an_error_on_every_rank(found: Found) -> None:
    errors = [one["errors"] for one in found]
    same = "on every rank"
    for words, name in {
        f"micro_batches must be the same {same}; got 8 on rank 0 and 16 on rank 2": "n",
        f"order of trainable parameters must be the same {same} (this is a hash of them); got": "model",
        "got {} on rank 0 and {} on rank 3": "frozen",
        f"divide must be the same {same}; got 1 on rank 0 and 0 on rank 1": "divide",
        "all ranks must have finished as many steps; got 0 on rank 0 and 1 on rank 3": "step",
    }.items():
        assert len({error[name] for error in errors}) == 1
        assert errors[0][name].startswith("RuntimeError: ")
        assert all(part in errors[0][name] for part in words.split("{}"))
    assert all("4 ranks cannot share 3 micro-batches" in error["ranks"] for error in errors)


def test_where_one_rank_refuses_the_others_are_told_which(found: Found) -> None:
    for rank, words in enumerate(one["errors"]["one refuses"] for one in found):
        assert ("divide must be True or False" if rank == 2 else f"rank 2 refused this call, so rank {rank} cannot go on") in words


def test_ddp_that_reduces_is_refused(found: Found) -> None:
    for errors in (one["errors"] for one in found):
        for name in ("ddp reduces", "ddp reduces after forward"):
            assert errors[name].startswith("RuntimeError: DistributedDataParallel reduces gradients itself: put the forward pass")


def test_training_ends_with_the_same_weights(found: Found) -> None:
    """Bare and in DDP, with the sampler and a data loader, weights by number of samples."""
    for count in (8, 6, 5):
        weights = {one[way][case] for one in found for way in ("in DDP", "bare") for case in one[way] if case[0] == count}
        assert len(weights) == 1
    own = [found[0]["by DDP"][8, ranks] for ranks in (1, 2, 4)]
    assert len(set(own)) == 3  # the control


def test_ddp_changes_no_bits(found: Found) -> None:
    """Unused and frozen parameters, three dtypes, ranks with unequal shares."""
    expected = found[0]["means"]["odd", 7, 1]
    assert {outcome for one in found for outcome in one["odd in DDP"].values()} == {expected}
    assert len(found[0]["odd in DDP"]) == len(DDP_OPTIONS) == 3


def test_a_late_rank_is_an_error_within_the_limit(found: Found) -> None:
    assert found[0]["late"]["words"].startswith("RuntimeError: rank 0 of 2 could not reach the others: another rank has ended, has not")
    assert LATE_LIMIT - 1 < found[0]["late"]["seconds"] < 2 * LATE_LIMIT


@pytest.mark.exhaustive
def test_more_ranks_more_micro_batches_and_small_buckets() -> None:
    found = run_processes(tree_workers.many_means, MANY_RANKS, limit=600)
    for (count, ranks, size), outcome in found[0].items():
        expected = bits(mean_by_definition(OddModel(), count).values())
        assert [found[rank][count, ranks, size] for rank in range(ranks)] == [expected] * ranks, (count, ranks, size, outcome)
    assert {ranks for _, ranks, _ in found[0]} == set(range(1, MANY_RANKS + 1))


def test_a_dead_rank_is_an_error_at_once() -> None:
    survivor, dead = ONE_DIES.found
    assert dead is None
    assert survivor["words"].startswith("RuntimeError: rank 0 of 2 could not reach the others: another rank has ended, has not come within")
    assert survivor["seconds"] < 30
