"""The tree: every micro-batch once, the same additions for every number of ranks, few sums kept."""

from __future__ import annotations

from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dash_attn.distributed.micro_batches.tree import CarryStack, fitting_ranks, share_of, tree_sum
from strategies import examples
from tree_models import tree_by_definition

COUNTS = [*range(1, 130), 255, 256, 257, 1000, 1024]
FORMULAS = {
    1: "0",
    2: "(0+1)",
    3: "((0+1)+2)",
    5: "(((0+1)+(2+3))+4)",
    6: "(((0+1)+(2+3))+(4+5))",
    7: "(((0+1)+(2+3))+((4+5)+6))",
    8: "(((0+1)+(2+3))+((4+5)+(6+7)))",
}


def formula_of(left: str, right: str) -> str:
    return f"({left}+{right})"


def streamed(leaves: list[str]) -> str:
    stack = CarryStack(formula_of)
    for leaf in leaves:
        stack.push(leaf)
    return stack.total()


def on_ranks(micro_batches: int, ranks: int) -> str:
    """What the ranks together compute, as a formula."""
    shares = [share_of(rank, ranks, micro_batches) for rank in range(ranks)]
    return tree_sum([streamed([str(index) for index in share]) for share in shares], formula_of)


@pytest.mark.parametrize("count", FORMULAS)
def test_the_tree_is_the_documented_one(count: int) -> None:
    leaves = [str(index) for index in range(count)]
    assert tree_sum(leaves, formula_of) == streamed(leaves) == tree_by_definition(leaves) == FORMULAS[count]


@pytest.mark.parametrize("count", COUNTS)
def test_every_fitting_number_of_ranks_computes_the_same_formula(count: int) -> None:
    expected = tree_by_definition([str(index) for index in range(count)])
    for ranks in fitting_ranks(count):
        assert on_ranks(count, ranks) == expected


@given(st.integers(1, 3000), st.data())
@examples(100)
def test_shares_cover_every_micro_batch_once_in_order(count: int, data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from(fitting_ranks(count)))
    shares = [share_of(rank, ranks, count) for rank in range(ranks)]
    assert [index for share in shares for index in share] == list(range(count))
    sizes = [len(share) for share in shares]
    assert sizes[-1] >= 1
    if ranks > 1:
        assert set(sizes[:-1]) == {sizes[0]}
        assert sizes[0] & (sizes[0] - 1) == 0
        assert sizes[-1] <= sizes[0]


@given(st.integers(1, 5000))
@examples(60)
def test_few_sums_are_kept(count: int) -> None:
    stack = CarryStack(max)
    for index in range(count):
        stack.push(index)
        assert len(stack._waiting) == (index + 1).bit_count() <= count.bit_length()  # floor(log2(count)) + 1
    stack.total()
    assert not stack._waiting


def test_other_orders_are_other_formulas() -> None:
    """The controls: subtrees swapped, a micro-batch left out, one after another, ranks that share unevenly."""
    expected = tree_by_definition([str(index) for index in range(8)])
    parts = [streamed([str(index) for index in share_of(rank, 4, 8)]) for rank in range(4)]
    assert tree_sum(parts, formula_of) == expected
    assert tree_sum([parts[0], parts[2], parts[1], parts[3]], formula_of) != expected
    assert streamed(["0", "1", "2", "3", "4", "5", "7"]) != expected
    assert reduce(formula_of, map(str, range(8))) != expected
    uneven = [streamed([str(index) for index in part]) for part in (range(0, 3), range(3, 6), range(6, 8))]
    assert tree_sum(uneven, formula_of) != expected


@pytest.mark.parametrize(
    ("count", "fitting"),
    [(1, [1]), (3, [1, 2, 3]), (5, [1, 2, 3, 5]), (6, [1, 2, 3, 6]), (12, [1, 2, 3, 6, 12]), (64, [1, 2, 4, 8, 16, 32, 64])],
)
def test_which_numbers_of_ranks_fit(count: int, fitting: list[int]) -> None:
    assert fitting_ranks(count) == fitting


def test_a_number_of_ranks_that_fits_not_is_told_which_do() -> None:
    with pytest.raises(ValueError, match=r"3 ranks cannot share 64 .* fit: 1, 2, 4, 8, 16, 32, 64\. .* 3 ranks share equally: 48, 96"):
        share_of(0, 3, 64)
    with pytest.raises(ValueError, match=r"8 ranks cannot share 5 .* fit: 1, 2, 3, 5\. .* 8 ranks share equally: 8, \.\.\."):
        share_of(0, 8, 5)


@given(st.integers(1, 300), st.integers(1, 300))
@examples(200)
def test_what_the_error_recommends_fits(count: int, ranks: int) -> None:
    if ranks in fitting_ranks(count):
        assert len(share_of(ranks - 1, ranks, count)) >= 1
        return
    with pytest.raises(ValueError, match="share equally") as raised:
        share_of(0, ranks, count)
    for number in str(raised.value).split("share equally: ")[1].removesuffix(", ...").split(", "):
        assert len({len(share_of(rank, ranks, int(number))) for rank in range(ranks)}) == 1


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "4", None])
def test_micro_batches_is_a_whole_number(count: object) -> None:
    with pytest.raises(ValueError, match="micro_batches must be a whole number >= 1"):
        share_of(0, 1, count)  # type: ignore[arg-type]
