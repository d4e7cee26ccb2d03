"""One of several ranks that share a sequence, on the CPU: the forward of its queries, and its units of the backward."""

from functools import partial

import torch
from torch import Tensor

from ...call.call import Call, Grads, Modifiers, Saved
from ...call.options import AttentionOptions
from ...execution.interleaving import Interleaving, current_interleaving
from ...execution.rules import Chain, ChainPlace, Coroutine, Ending, Landed
from ...execution.run import run_chains
from ...scheduling.plan import Plan
from ...scheduling.problem import Problem
from ...scheduling.ranks.sharding import Sharding
from ...scheduling.ranks.units import SharedSchedule, Unit
from .. import walk_in_legs
from .tiles import TILE_KV, TILE_Q, BackwardTiles, Share, State, fixed_arithmetic, forward_of_share, sink_gradients


def backward_tiles(head_dim: int, value_dim: int) -> tuple[int, int]:
    return TILE_Q, TILE_KV


def tile_size(head_dim: int, value_dim: int) -> int:
    """Numbers in the state of a KV tile."""
    return TILE_KV * (head_dim + value_dim)


def heads_together(problem: Problem, sharding: Sharding) -> int:
    """One: there is nothing to fill, and states are smallest."""
    return 1


def machine_code() -> str:
    """PyTorch's products decide the bits."""
    return f"PyTorch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"


def forward(call: Call, problem: Problem, sharding: Sharding, rank: int) -> Saved:
    """Of the rank's queries. k and v are those of the whole sequence."""
    return forward_of_share(call, problem, Share(problem, sharding, rank))


class RankBackward(BackwardTiles):
    """The backward of a rank. `run` its units in their sequence; states come from and go to whoever has the leg before and after."""

    def __init__(
        self,
        plan: Plan,
        shared: SharedSchedule,
        rank: int,
        options: AttentionOptions,
        rows: tuple[Tensor, ...],
        of_rows: tuple[Tensor, Tensor | None],
        modifiers: Modifiers | None = None,
    ) -> None:
        """rows: dout, q and out of the rank; of_rows: its LSE and, where it was used, the gradient of that."""
        with fixed_arithmetic():
            super().__init__(plan, options, rows, of_rows, Share(plan.problem, shared.sharding, rank), modifiers)
        self.plan, self.shared, self.rank = plan, shared, rank
        self.landed = Landed(plan, self, ordered=True)
        self.dims = rows[1].shape[-1], rows[0].shape[-1]

    def drop_keys(self, first_head: int, heads: int) -> None:
        for head in range(first_head, first_head + heads):
            del self.keys[head]

    def state_size(self, unit: Unit) -> int:
        """Numbers in the states of a unit."""
        return self.shared.state_tiles(unit) * tile_size(*self.dims)

    def new_state(self, unit: Unit) -> Tensor:
        """Where a trip begins."""
        return self.q.new_zeros(self.state_size(unit))

    def run(self, unit: Unit, state: Tensor) -> None:
        """Walk a leg, or end a trip. The states are added to in their memory."""
        states = self._states(unit, state)
        if unit.leg is None:
            walks: dict[ChainPlace, Coroutine] = {place: iter([Ending(ended)]) for place, ended in states.items()}
        else:
            walks = {place: self._walk(unit, place, states[place]) for place in self._places(unit, self.shared.leg_of(unit).kv_tiles)}
        starts = (partial(Chain, self.plan, place, walk) for place, walk in walks.items())
        with fixed_arithmetic():
            run_chains(self.landed, starts, current_interleaving() or Interleaving())

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV of the rank's rows."""
        self.check()
        with fixed_arithmetic():
            return self.gradients()

    def check(self) -> None:
        """Raise ExecutionError unless every unit of the rank has run."""
        endings = (unit for unit in self.shared.by_rank[self.rank] if unit.leg is None)
        self.landed.finish(self.share.q_tiles, sum(map(self.shared.state_tiles, endings)))

    @property
    def rows_of_sinks(self) -> Tensor:
        """LSE and delta, by Q tile: (2, batch, query heads, tiles, rows). Sums over all rows need those of all ranks."""
        return torch.stack([self.lse, self.delta])

    def sink_gradients(self, rows: Tensor, sinks: Tensor) -> Tensor:
        """(batch, query heads), from the `rows_of_sinks` of all ranks, tiles in the order of the sequence."""
        with fixed_arithmetic():
            return sink_gradients(rows[0], rows[1], sinks.detach().to(rows.dtype))

    def _walk(self, unit: Unit, place: ChainPlace, state: State) -> Coroutine:
        assert unit.leg is not None
        steps = self.plan.steps(unit.kind, place.kv_tile)[self.shared.trips[unit.kind].steps(place.kv_tile, unit.leg)]
        return self.walk(place, steps, self.plan.members(place.part)[unit.member], state)

    def _places(self, unit: Unit, kv_tiles: tuple[int, ...]) -> list[ChainPlace]:
        return [ChainPlace(*head, kv_tile) for head in unit.heads for kv_tile in kv_tiles]

    def _states(self, unit: Unit, state: Tensor) -> dict[ChainPlace, State]:
        """The states of a unit, side by side in one piece of memory: dK and dV of each KV tile, head by head."""
        places = self._places(unit, self.shared.column_of(unit).kv_tiles)
        sizes = [TILE_KV * dim for dim in self.dims]
        found = {}
        for place, one in zip(places, state.view(len(places), sum(sizes)), strict=True):
            dk, dv = one.split(sizes)
            found[place] = dk.view(TILE_KV, self.dims[0]), dv.view(TILE_KV, self.dims[1])
        return found


def run_in_legs(plan: Plan, legs: SharedSchedule, call: Call, saved: Saved, grads: Grads) -> RankBackward:
    """A backward on one rank that has too few workers for whole chains."""
    rows, of_rows = (grads.out, call.q, saved.out), (saved.lse, grads.lse)
    backward = RankBackward(plan, legs, 0, call.options, rows, of_rows, call.modifiers)
    backward.take_keys(call.k, call.v)
    walk_in_legs(backward, legs)
    backward.check()
    return backward
