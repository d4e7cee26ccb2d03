"""Before ranks work on one sequence, they compare what they were asked to do. Where they disagree, every rank raises.

They do so at every call, forward and backward, whatever the device. A host then waits for the hosts of the others, not for a GPU: work
that was queued goes on meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

from ..peers import Peers

Facts = dict[str, object]
Made = TypeVar("Made")
ORDER = "ranks that share a sequence must run their backwards in one order"


def agree(peers: Peers, call: str, make: Callable[[], tuple[Made, Facts]], backward_of: int = 0) -> Made:
    """What `make` gives, if it gives it on every rank and all ranks have the same facts. `make` sends no message: others may not
    make the same. call: which function this is. backward_of: the number of the call whose backward it is."""
    with peers.refusing(call):
        made, facts = make()
    if peers.count > 1:
        _compare(peers, peers.begin(call, [_number(facts), len(facts), backward_of]), facts)
    return made


def _compare(peers: Peers, rows: list[list[int]], facts: Facts) -> None:
    """rows: hash and number of facts, and the call whose backward it is, by rank."""
    found, lengths, forwards = ([row[place] for row in rows] for place in range(3))
    odd = next((rank for rank, number in enumerate(forwards) if number != forwards[0]), None)
    if odd is not None:
        raise RuntimeError(f"{ORDER}; rank 0 is in that of call {forwards[0]} of the group, and rank {odd} in that of call {forwards[odd]}")
    if len(set(lengths)) > 1:
        raise RuntimeError(f"ranks that share a sequence must have one version of dash_attn; they compare {lengths} facts, by rank")
    if len(set(found)) > 1:
        _tell_difference(peers, facts)


def _tell_difference(peers: Peers, facts: Facts) -> None:
    """Fact by fact, so that the error names the one that differs."""
    rows = peers.gather_numbers([_number({name: value}) for name, value in facts.items()])
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
