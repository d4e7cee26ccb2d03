"""One process plays all ranks that share a sequence, unit by unit: to test and to prove, without processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ...call.modifiers import Modifiers
from ...call.sums import sum_in_order
from ...scheduling.ranks.units import Unit
from .gathering import WholeKeys, sharding_of_tiles
from .passes import BackwardPass, forward_pass
from .rows import rows_of
from .shared_call import SharedCall


class Results(NamedTuple):
    """Of the whole sequence."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None = None


class Mailbox:
    """States that are on their way. The sender's memory is overwritten, as a real sender's might be."""

    def __init__(self) -> None:
        self.states: dict[int, Tensor] = {}

    def send(self, unit: Unit, state: Tensor) -> None:
        self.states[unit.number] = state.clone()
        state.fill_(torch.nan)

    def receive(self, unit: Unit) -> Tensor:
        assert unit.before is not None
        return self.states.pop(unit.before)


def play_all_ranks(
    call: SharedCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    mailbox: Mailbox | None = None,
    *,
    sinks: Tensor | None = None,
    dlse: Tensor | None = None,
    modifiers: Modifiers | None = None,
    units: Iterable[Unit] | None = None,
) -> Results:
    """Forward and backward of whole tensors, each rank with its own rows. dlse: the gradient of the LSE, where it was used. units: in
    the order to run them, if it is not their own."""
    mailbox = Mailbox() if mailbox is None else mailbox
    keys, numbers = WholeKeys(call, k, v), range(call.sharding.ranks)
    out, lse = torch.empty_like(dout), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))
    ranks = []
    for rank in numbers:
        mine = rows_of(call.sharding, rank, q.device)
        out[:, mine], lse[:, :, mine] = forward_pass(call, rank, q[:, mine], keys, sinks, modifiers)
        of_rows = lse[:, :, mine], None if dlse is None else dlse[:, :, mine]
        ranks.append(BackwardPass(call, rank, (dout[:, mine], q[:, mine], out[:, mine]), of_rows, keys, mailbox, modifiers))
    for unit in call.shared.units if units is None else units:
        ranks[unit.rank].step(unit)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    for rank in numbers:
        mine = rows_of(call.sharding, rank, q.device)
        for whole, part in zip((dq, dk, dv), ranks[rank].finish(), strict=True):
            whole[:, mine] = part
    return Results(out, lse, dq, dk, dv, None if sinks is None else _sink_gradient(call, ranks, sinks))


def _sink_gradient(call: SharedCall, ranks: list[BackwardPass], sinks: Tensor) -> Tensor:
    """From the rows of all ranks, tiles in the order of the sequence."""
    parts = [rank.backward.rows_of_sinks for rank in ranks]
    tiles = sharding_of_tiles(call.sharding, parts[0].shape[-1])
    whole = parts[0].new_empty(*parts[0].shape[:-2], tiles.rows, parts[0].shape[-1])
    for rank, part in enumerate(parts):
        whole[..., rows_of(tiles, rank, whole.device), :] = part
    return sum_in_order(ranks[0].backward.sink_gradients(whole, sinks)).to(sinks.dtype)
