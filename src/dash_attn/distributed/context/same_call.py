"""Before ranks work on one sequence, they compare what they were asked to do. Where they disagree, every rank raises.

Without that, gloo ends the process where two ranks send tensors of different sizes, and NCCL waits for its time limit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup

from ..peers import Peers

Facts = dict[str, object]
REFUSED = -1
_agreed: WeakKeyDictionary[ProcessGroup, set[int]] = WeakKeyDictionary()  # hashes of calls that ranks of a group have compared


class HasFacts(Protocol):
    @property
    def facts(self) -> Facts: ...


Made = TypeVar("Made", bound=HasFacts)


def agree(peers: Peers, device: torch.device, make: Callable[[], Made]) -> Made:
    """What `make` gives, if it gives it on every rank and all ranks have the same facts. `make` sends no message: others may not
    make the same.

    Tensors on the CPU are compared at every call. On a GPU, where the host would wait, at the first call of a kind.
    """
    if peers.group is None:
        return make()
    failure: Exception | None = None
    made, mine = None, Facts()
    try:
        made = make()
        mine = made.facts
    except Exception as error:  # whatever it is, the others wait to hear of it
        failure = error
    numbers = [REFUSED] if failure is not None else [_number(mine)]
    known = _agreed.setdefault(peers.group, set())
    if failure is not None or device.type == "cpu" or numbers[0] not in known:
        _compare(peers, device, numbers[0], mine, failure)
        known.add(numbers[0])
    assert made is not None
    return made


def _compare(peers: Peers, device: torch.device, mine: int, facts: Facts, failure: Exception | None) -> None:
    rows = peers.gather_numbers([mine, len(facts)], device)
    found, lengths = [row[0] for row in rows], [row[1] for row in rows]
    if failure is not None:
        raise failure
    refused = [rank for rank, number in enumerate(found) if number == REFUSED]
    if refused:
        raise RuntimeError(f"rank {refused[0]} refused this call, so rank {peers.rank} cannot go on: see the error of rank {refused[0]}")
    if len(set(lengths)) > 1:
        odd = next(rank for rank, length in enumerate(lengths) if length != lengths[0])
        raise RuntimeError(f"ranks that share a sequence must call the same functions in the same order; rank 0 and rank {odd} do not")
    if len(set(found)) > 1:
        _tell_difference(peers, device, facts)


def _tell_difference(peers: Peers, device: torch.device, facts: Facts) -> None:
    """Fact by fact, so that the error names the one that differs."""
    rows = peers.gather_numbers([_number({name: value}) for name, value in facts.items()], device)
    for place, (name, value) in enumerate(facts.items()):
        column = [row[place] for row in rows]
        odd = [rank for rank, number in enumerate(column) if number != column[0]]
        if odd:
            same = [rank for rank, number in enumerate(column) if number == column[peers.rank]]
            raise RuntimeError(
                f"ranks that share a sequence must be asked for the same; rank 0 and rank {odd[0]} differ in {name}."
                f" Here, on rank {peers.rank}, it is {value} (as on {len(same)} of {peers.count} ranks)"
            )


def _number(facts: Facts) -> int:
    """63 bits, to fit a signed number."""
    return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:8], "big") >> 1
