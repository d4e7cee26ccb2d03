"""What ranks that share a sequence do in the tests. Functions of a module, so that new processes can import them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dash_attn.call.call import Given
from dash_attn.distributed import context_parallel_attention, shard
from dash_attn.distributed.context import of_rank
from dash_attn.distributed.context.mail import Keys
from dash_attn.distributed.context.of_rank import BackwardPass, Gradients, OfRows, RowBackward, Rows
from dash_attn.distributed.context.shared_call import OwnDocument, SharedCall
from dash_attn.distributed.peers import Peers
from dash_attn.scheduling.ranks.units import Unit
from document_cases import ROWS, wide_rows
from shared_cases import CASES, F32, RANKS, Case, Inputs, results
from shared_problems import wide_cases

MEMBERS = {1: [3], 2: [2, 3], 3: [0, 1, 2], 4: [0, 1, 2, 3]}  # of groups: a rank of the group need not be one of the world


def grid(rank: int) -> dict[str, dict[str, Any]]:
    return _run(rank, CASES)


def wide_grid(rank: int) -> dict[str, dict[str, Any]]:
    return _run(rank, wide_cases())


def documents_grid(rank: int) -> dict[str, dict[str, Any]]:
    return _run(rank, {name: given.shared for name, given in ROWS.items()}, with_control=False)


def wide_documents_grid(rank: int) -> dict[str, dict[str, Any]]:
    return _run(rank, {name: given.shared for name, given in wide_rows().items()}, with_control=False)


def _run(rank: int, cases: dict[str, Case], with_control: bool = True) -> dict[str, dict[str, Any]]:
    """By case: this rank's results, its rank in the group, and dK and dV of the control."""
    groups = make_groups()
    return {name: _one(case, groups[case.ranks], with_control) for name, case in cases.items() if rank in MEMBERS[case.ranks]}


def make_groups() -> dict[int, Any]:
    return {count: dist.new_group(MEMBERS[count]) for count in range(1, RANKS + 1)}


def own_inputs(case: Case, group: Any) -> Inputs:
    """Made from tensors in which all rows of other ranks are NaN."""
    whole = Inputs.of(case)

    def own(x: Tensor, dim: int = 1) -> Tensor:
        everybody = torch.arange(case.rows)
        others = ~torch.isin(everybody, shard(everybody, group, 0, sharding=case.sharding))
        return shard(x.index_fill(dim, everybody[others], torch.nan), group, dim, sharding=case.sharding)

    q, k, v = (own(x).requires_grad_() for x in (whole.q, whole.k, whole.v))
    return Inputs(q, k, v, own(whole.dout), own(whole.dlse, 2), whole.sinks)


def attend(case: Case, inputs: Inputs, group: Any) -> tuple[Tensor, Tensor]:
    given: dict[str, Any] = {"sinks": inputs.sinks, "sharding": case.sharding, "ulysses": case.ulysses, "return_lse": True}
    return context_parallel_attention(inputs.q, inputs.k, inputs.v, group, **given, **case.call)  # type: ignore[return-value]


def _one(case: Case, group: Any, with_control: bool) -> dict[str, Any]:
    inputs = own_inputs(case, group)
    out, lse = attend(case, inputs, group)
    leaves = [inputs.q, inputs.k, inputs.v] + ([] if inputs.sinks is None else [inputs.sinks])
    found = results(case, out, lse, leaves, (inputs.dout, inputs.dlse), retain_graph=True)
    return {"rank": dist.get_rank(group), "results": found, "control": _control(case, inputs, (out, lse)) if with_control else None}


def _control(case: Case, inputs: Inputs, outputs: tuple[Tensor, Tensor]) -> dict[str, Tensor] | None:
    if case.dtype is not F32 or case.ranks == case.ulysses:
        return None
    with _sums_by_all_reduce():
        return results(case, *outputs, [inputs.q, inputs.k, inputs.v], (inputs.dout, inputs.dlse))


@contextmanager
def _sums_by_all_reduce() -> Iterator[None]:
    kept, of_rank._backward = of_rank._backward, _share_by_all_reduce
    yield
    of_rank._backward = kept


class _Partials(BackwardPass):
    """The control: each rank sums what its own queries give, with the same products in the same order, and no state travels."""

    def __init__(self, row: RowBackward, own: OwnDocument) -> None:
        super().__init__(row, own, mail=None)  # type: ignore[arg-type]
        self.sums: dict[Any, Tensor] = {}

    def sum_of(self, unit: Unit) -> Tensor:
        return self.sums.setdefault((unit.kind, unit.heads, unit.column), self.backward.new_state(unit))

    def step(self, unit: Unit) -> None:
        self._take_keys(unit)
        self.backward.run(unit, self.sum_of(unit))
        self._drop_keys(unit)


def _share_by_all_reduce(call: SharedCall, peers: Peers, rows: Rows, of_rows: OfRows, given: Given) -> Gradients:
    dout, q, k, v, out = rows
    row = RowBackward(call, peers.rank, (dout, q, out), of_rows, lambda own: Keys(own.document, k, v, peers), given)
    (own,) = row.own
    work = _Partials(row, own)
    for unit in work.units:
        if unit.leg is not None:
            work.step(unit)
    work.keys.start(len(own.document.gathers) - 1)
    work.keys.finish()
    for unit in own.document.shared.units:
        if unit.leg is None:
            state = work.sum_of(unit)
            dist.all_reduce(state, group=peers.group)
            if unit.rank == peers.rank:
                work.backward.run(unit, state)
    return *work.backward.finish(), None
