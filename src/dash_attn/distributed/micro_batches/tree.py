"""One binary tree over the micro-batches of a step: it fixes which sums are added, whoever computes them.

A tree of n leaves is a single leaf (n = 1), or the sum of a left tree and a right tree: the left one has as many leaves as
the largest power of two below n, the right one has the rest. Leaves are micro-batches, in global order.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ...scheduling.problem import whole_number

Sum = TypeVar("Sum")


def tree_sum(terms: Sequence[Sum], add: Callable[[Sum, Sum], Sum]) -> Sum:
    """The sum of terms that are all there. `add` gets the left sum first."""
    if len(terms) == 1:
        return terms[0]
    left = 1 << ((len(terms) - 1).bit_length() - 1)  # the largest power of two below
    return add(tree_sum(terms[:left], add), tree_sum(terms[left:], add))


class CarryStack(Generic[Sum]):
    """The same sum of terms that come one by one.

    It keeps the subtrees that wait for their right neighbour, one for each 1 in the binary number of terms so far.
    Of n terms, at most floor(log2(n)) + 1 sums are kept.
    """

    def __init__(self, add: Callable[[Sum, Sum], Sum]) -> None:
        self._add = add
        self._waiting: list[tuple[int, Sum]] = []  # leaves and sum of each subtree

    def push(self, term: Sum) -> None:
        leaves = 1
        while self._waiting and self._waiting[-1][0] == leaves:
            term = self._add(self._waiting.pop()[1], term)
            leaves *= 2
        self._waiting.append((leaves, term))

    def total(self) -> Sum:
        """The sum of all terms; none is kept."""
        _, total = self._waiting.pop()
        while self._waiting:
            total = self._add(self._waiting.pop()[1], total)
        return total


def fitting_ranks(micro_batches: int) -> list[int]:
    """The numbers of ranks that can share them: a rank has 2^k micro-batches, the last rank may have fewer."""
    return sorted({-(-micro_batches >> k) for k in range(micro_batches.bit_length() + 1)})


def share_of(rank: int, ranks: int, micro_batches: int) -> range:
    """The micro-batches of a rank: one subtree. Subtrees of 2^k leaves follow each other, so a rank's range begins at rank * 2^k."""
    whole_number("micro_batches", micro_batches)
    sizes = [1 << k for k in range(micro_batches.bit_length() + 1) if -(-micro_batches >> k) == ranks]
    if not sizes:
        below = ranks << max((micro_batches // ranks).bit_length() - 1, 0)
        equally = [below] if below > micro_batches else [below, 2 * below]
        raise ValueError(
            f"{ranks} ranks cannot share {micro_batches} micro-batches: each rank needs a whole subtree. "
            f"Numbers of ranks that fit: {', '.join(map(str, fitting_ranks(micro_batches)))}. "
            f"Numbers of micro-batches that {ranks} ranks share equally: {', '.join(map(str, equally))}, ..."
        )
    return range(rank * sizes[0], min((rank + 1) * sizes[0], micro_batches))
