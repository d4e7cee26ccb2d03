"""The backward of one of several ranks that share a sequence: preprocess, its units one launch after the other, postprocess.

Semaphores, dQ and the sums of dK and dV live through all units. Between units the states of chains are in memory.

A GPU, or a slice of one, with too few SMs for the gangs of an order runs as a rank that is alone. Same bits; many launches instead of one.
"""

from ctypes import addressof
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....call.call import Call, Gradients, Modifiers, cut, sum_in_order
from ....call.options import AttentionOptions
from ....scheduling.plan import Plan
from ....scheduling.ranks.units import SharedSchedule, Unit, most_states
from ... import walk_in_legs
from ..driver.launch import Launch, current_stream, device_index, on_device
from ..driver.parameters import EndingParams, LegParams, Pair, SinkGradientParams, TilePlaces
from ..driver.tensor_map import TensorMap, tma_ready
from ..driver.trouble import raise_if_troubled
from ..driver.workspace import Workspace
from ..support import DTYPES, check_call, check_kinds, refuse_modifiers, sm_count
from ..tiles import backward_dims, backward_tiles, threads_per_row
from .backward_setup import BackwardSetup, Parameters, workspace_sizes
from .kernel_names import BackwardKernels, Variant, leg_kernels
from .layout import row_strides
from .leg_tables import LegTables, legs_on_device
from .tables import mask_kind

MOST_WAITING = 2**28  # bytes of states whose endings wait for a moment at which nothing overlaps
ENDING_FLOATS = 1024  # of a block of end_trips


def tile_size(head_dim: int, value_dim: int) -> int:
    """Numbers in the state of a KV tile."""
    dims = backward_dims(head_dim, value_dim)
    return backward_tiles(*dims).kv_rows * sum(dims)


@dataclass(frozen=True)
class Keys:
    """Keys and values of some KV heads, their tensor maps, and launches that read them, by the number of CTAs."""

    heads: range
    tensors: tuple[Tensor, Tensor]
    maps: tuple[TensorMap, TensorMap]
    launches: dict[int, Launch]


class LegLaunch(NamedTuple):
    """A launch of a unit, or of those of its heads whose keys are in one tensor."""

    keys: Keys
    records: int
    counter: int
    chains: int


class RankBackward:
    """`run` the rank's units in their sequence. States come from and go to whoever has the leg before and after.

    overlap: a launch may start while the one before it ends, where its states come from this rank. The bits are the same.
    """

    def __init__(
        self,
        plan: Plan,
        shared: SharedSchedule,
        rank: int,
        options: AttentionOptions,
        rows: tuple[Tensor, ...],
        of_rows: tuple[Tensor, Tensor | None],
        overlap: bool = False,
        modifiers: Modifiers | None = None,
    ) -> None:
        """rows: dout, q and out of the rank; of_rows: its LSE and, where it was used, the gradient of that. Options that come with
        modifiers are refused."""
        self.plan, self.shared, self.number, self.options, self.overlap = plan, shared, rank, options, overlap
        dout, q, out = rows
        self.dims = q.shape[-1], dout.shape[-1]
        self.kernel_dims = backward_dims(*self.dims)
        self.tiles = backward_tiles(*self.kernel_dims)
        self._check(q, dout)
        self.device, self.index = q.device, device_index(q.device)
        self.workers = sm_count(self.index)
        self.keys: dict[int, Keys] = {}  # by KV head
        self.more_counters: list[Tensor] = []  # of launches that the tables do not know
        self._ran: set[int] = set()  # numbers of units
        self._walked = False  # whether a launch has waited for the preprocess, and for those that read keys which are gone
        self._waiting: list[tuple[Unit, Tensor]] = []  # endings
        raise_if_troubled()
        with on_device(self.index):
            self.legs = legs_on_device(plan, shared, rank, self.kernel_dims, self.device)
            self.sizes = self.legs.host.sizes
            self.dout, self.q, self.out = (tma_ready(x.detach()) for x in (dout, q, out))
            self.maps = [TensorMap(x, self.tiles.q_rows) for x in (self.q, self.dout)]
            self.counters = self.legs.tables.copy_of("counters")
            self.memory, self.at = Workspace(**workspace_sizes(self.sizes, self.tiles, self.kernel_dims)).allocate(self.device)
            self._prepare(*of_rows)

    def _check(self, q: Tensor, dout: Tensor) -> None:
        """Raise where the plan is not for these tensors, or the kernels cannot walk it."""
        problem, rows = self.plan.problem, len(self.shared.sharding.rows_of(self.number))
        check_call(q, dout, self.options)
        refuse_modifiers(self.options, "ranks that share a sequence")
        check_kinds(self.plan.kinds)
        if not self.options.ordered:
            raise ValueError("ranks that share a sequence have ordered sums; got accumulation='unordered'")
        if (problem.tile_q, problem.tile_kv) != (self.tiles.q_rows, self.tiles.kv_rows):
            raise ValueError(
                f"tiles of {problem.tile_q} x {problem.tile_kv} rows in the plan; the kernels of head dims {self.kernel_dims} have"
                f" {self.tiles.q_rows} x {self.tiles.kv_rows}"
            )
        expected = problem.batch, rows, problem.heads * problem.group
        if tuple(q.shape[:3]) != expected:
            raise ValueError(f"rank {self.number} has (batch, rows, query heads) {expected}; got q of {tuple(q.shape[:3])}")

    def _prepare(self, lse: Tensor, dlse: Tensor | None) -> None:
        """Parameters and kernels. The first one runs."""
        options, sizes, tables, mask = self.options, self.sizes, self.legs.tables, self.legs.mask.params
        self.params = Parameters(sizes, self.tiles, options, mask)
        self.params.take_shapes(self.q, self.out, self.dout)
        lse, dlse = lse.detach().contiguous(), None if dlse is None else dlse.detach().contiguous()
        self.params.work_in(self.at)
        self.params.read(self.out, self.dout, lse, dlse)
        self.main, self.leg, after = self.params.main, LegParams(), self.params.after
        self.main.runs, self.main.entries, after.q_turns = tables["runs"], tables["entries"], tables["q_turns"]
        self.end = EndingParams(sums=self.at["sums"], semaphores=self.at["semaphores"] + 4 * sizes.first_sum)
        after.sums.sums, after.sums.parts = self.at["sums"], Pair(*self.plan.parts_of_sums)
        variant = Variant.of(DTYPES[self.q.dtype], self.kernel_dims[0], options, mask_kind(options.mask))
        self.kernels = leg_kernels(variant, self.kernel_dims[1])
        self._attention = self.kernels.attention.load(self.index)
        assert self.kernels.ending is not None
        self._end_trips = self.kernels.ending.load(self.index)
        self._endings: dict[int, Launch] = {}  # by the number of blocks
        threads = sizes.dq_tiles * self.tiles.q_rows * threads_per_row(self.kernel_dims[1])
        self.kernels.preprocess.by_thread(self.index, threads, self.params.before).on(current_stream(self.index))

    # ---- keys

    def take_keys(self, k: Tensor, v: Tensor, first_head: int) -> None:
        """All keys and values of some KV heads, before the first unit that needs them."""
        problem = self.plan.problem
        for name, x, dim in (("k", k, self.dims[0]), ("v", v, self.dims[1])):
            if tuple(x.shape) != (problem.batch, problem.kv_len, k.shape[2], dim) or x.dtype != self.q.dtype or x.device != self.device:
                raise ValueError(
                    f"{name} must have all {problem.kv_len} rows of {problem.batch} sequences, head dim {dim}, as {self.q.dtype} on"
                    f" {self.device}; got {tuple(x.shape)} as {x.dtype} on {x.device}"
                )
        heads = range(first_head, first_head + k.shape[2])
        with on_device(self.index):
            tensors = tma_ready(k.detach()), tma_ready(v.detach())
            maps = TensorMap(tensors[0], self.tiles.kv_rows), TensorMap(tensors[1], self.tiles.kv_rows)
        self.keys.update(dict.fromkeys(heads, Keys(heads, tensors, maps, {})))

    def drop_keys(self, first_head: int, heads: int) -> None:
        """Their memory is free for whatever comes next in the stream: so the next launch must not overlap one that reads them."""
        for head in range(first_head, first_head + heads):
            del self.keys[head]
        self._walked = False

    # ---- states

    def state_size(self, unit: Unit) -> int:
        """Numbers in the states of a unit."""
        return self.shared.state_tiles(unit) * tile_size(*self.dims)

    def new_state(self, unit: Unit) -> Tensor:
        """Where a trip begins. A chain that begins reads nothing, but one that has no leg at all ends with zeros."""
        make = torch.zeros if unit.leg is None else torch.empty
        return make(self.state_size(unit), dtype=torch.float32, device=self.device)

    def _check_state(self, unit: Unit, state: Tensor) -> None:
        if state.dtype != torch.float32 or state.device != self.device or state.numel() != self.state_size(unit):
            raise ValueError(
                f"the states of {self.shared.describe(unit)} are {self.state_size(unit)} float32 numbers on {self.device}; got"
                f" {state.numel()} {state.dtype} on {state.device}"
            )
        if not state.is_contiguous() or state.data_ptr() % 16:
            raise ValueError("states must be contiguous and begin at a multiple of 16 bytes")

    # ---- units

    def run(self, unit: Unit, state: Tensor) -> None:
        """Walk a leg, or end a trip. The states are added to in their memory."""
        self._check_state(unit, state)
        self._check_turn(unit)
        with on_device(self.index):
            stream = current_stream(self.index)
            if unit.leg is None:
                self._waiting.append((unit, state))
                if not self.overlap or sum(x.nbytes for _, x in self._waiting) > MOST_WAITING:
                    self._end_all(stream)
            else:
                self._begin(unit, state)
                for launch in self._launches(unit):
                    self._walk(launch, stream)
        self._ran.add(unit.number)

    def _begin(self, unit: Unit, state: Tensor) -> None:
        """What the first launch reads, and states from another rank, are there when whatever is before has ended."""
        semaphores, before = self.legs.host.semaphore_of, unit.before
        self.main.sums, self.main.first_sum = state.data_ptr(), semaphores[unit.number]
        self.leg.states = None if before is None else state.data_ptr()
        here = before is not None and self.shared.units[before].rank == self.number
        self.leg.overlaps = int(self.overlap and self._walked and (here or before is None))
        self.leg.awaited = semaphores[before] if here and before is not None and self.leg.overlaps else -1

    def _check_turn(self, unit: Unit) -> None:
        """A kernel would wait for what never comes."""
        if unit.rank != self.number:
            raise ValueError(f"unit {unit.number} belongs to rank {unit.rank}; this is rank {self.number}")
        if unit.number in self._ran:
            raise RuntimeError(f"unit {unit.number} ran already: {self.shared.describe(unit)}")
        missing = [self.shared.units[other] for other in self.shared.waits[unit.number] if other not in self._ran]
        missing = [other for other in missing if other.rank == self.number]
        if missing:
            raise RuntimeError(
                f"unit {unit.number} ({self.shared.describe(unit)}) waits for unit {missing[0].number}"
                f" ({self.shared.describe(missing[0])}), which has not run on this rank"
            )

    def _launches(self, unit: Unit) -> list[LegLaunch]:
        """One, where the keys of all heads are in one tensor."""
        parts = self.plan.problem.parts
        needed = {part // parts for _, part in unit.heads}
        if not needed <= self.keys.keys():
            raise RuntimeError(f"unit {unit.number} needs the keys of KV heads {sorted(needed)}; there are those of {sorted(self.keys)}")
        groups = list({id(keys): keys for keys in map(self.keys.__getitem__, sorted(needed))}.values())
        host = self.legs.host
        if len(groups) == 1:
            counter = self.counters.data_ptr() + 8 * host.counter_of[unit.number]
            return [LegLaunch(groups[0], self.legs.records(unit), counter, len(host.chains[unit.number]))]
        launches = []
        for keys in groups:
            heads = tuple(head for head in unit.heads if head[1] // parts in keys.heads)
            tables = self.legs.of_some_heads(unit, heads)
            self.more_counters.append(tables.copy_of("counters"))
            chains = len(heads) * len(self.shared.leg_of(unit).kv_tiles)
            launches.append(LegLaunch(keys, tables["records"], self.more_counters[-1].data_ptr(), chains))
        return launches

    def _walk(self, launch: LegLaunch, stream: Any) -> None:
        self.main.tickets, self.main.next_ticket, self.leg.first_kv_head = launch.records, launch.counter, launch.keys.heads.start
        prepared, grid = launch.keys.launches, min(self.workers, launch.chains)
        if grid not in prepared:
            q_map, do_map = self.maps
            maps = q_map, *launch.keys.maps, do_map
            arguments = [*(m.address for m in maps), addressof(self.main), addressof(self.leg)]
            prepared[grid] = self._attention.prepare(grid, arguments, early=True)
        prepared[grid].on(stream)
        self._walked = True

    def _end_all(self, stream: Any) -> None:
        """Endings that wait, one after the other, when everything before has ended."""
        for unit, state in self._waiting:
            self.end.endings, self.end.states = self.legs.endings(unit), state.data_ptr()
            blocks = len(self.legs.host.ends[unit.number]) * tile_size(*self.dims) // ENDING_FLOATS
            if blocks not in self._endings:
                self._endings[blocks] = self._end_trips.prepare(blocks, [addressof(self.end)])
            self._endings[blocks].on(stream)
        self._waiting.clear()

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV of the rank's rows."""
        missing = [unit for unit in self.shared.by_rank[self.number] if unit.number not in self._ran]
        if missing:
            first = self.shared.describe(missing[0])
            raise RuntimeError(f"{len(missing)} units of rank {self.number} have not run; the first is {missing[0].number} ({first})")
        sizes = self.sizes
        with on_device(self.index):
            dims = self.q.shape[-1], self.dout.shape[-1]
            dq = self.q.new_empty(self.q.shape)
            dk, dv = (self.q.new_empty(sizes.batch, sizes.keys, sizes.kv_heads, dim) for dim in dims)
            after = self.params.after
            after.dq, after.strides, after.sums.dk, after.sums.dv = dq.data_ptr(), row_strides(dq), dk.data_ptr(), dv.data_ptr()
            self._end_all(current_stream(self.index))
            kernel = self.kernels.postprocess.load(self.index)
            kernel.prepare(sizes.postprocess_blocks(self.tiles), [addressof(after)]).on(current_stream(self.index))
        return cut(dq, self.dims[0]), cut(dk, self.dims[0]), cut(dv, self.dims[1])

    # ---- sinks

    @property
    def rows_of_sinks(self) -> Tensor:
        """LSE in base 2 and delta, by Q tile: (2, batch, query heads, tiles, rows). Sums over all rows need those of all ranks."""
        sizes = self.sizes
        shape = sizes.batch, sizes.q_heads, sizes.q_tiles, self.tiles.q_rows
        begin, rows = self.memory.data_ptr(), sizes.dq_tiles * self.tiles.q_rows
        parts = [self.memory[self.at[name] - begin :][: 4 * rows].view(torch.float32).view(shape) for name in ("lse", "delta")]
        return torch.stack(parts)

    def sink_gradients(self, rows: Tensor, sinks: Tensor) -> Tensor:
        """(batch, query heads), from the `rows_of_sinks` of all ranks, tiles in the order of the sequence."""
        rows = rows.contiguous()
        batch, heads, tiles, _ = rows.shape[1:]
        places = TilePlaces(batch=1, q_heads=heads, group=1, q_len=self.plan.problem.q_len, head_tiles=tiles)
        with on_device(self.index):
            logits = sinks.detach().float().contiguous()
            parts = torch.empty(batch, heads, dtype=torch.float32, device=self.device)
            params = SinkGradientParams(sinks=logits.data_ptr(), sequences=1, tiles=places)
            launch = self.kernels.sink_gradient.load(self.index).prepare(heads, [addressof(params)])
            for sequence in range(batch):  # each by itself: the caller adds them up, first to last
                params.lse_log2, params.delta = (rows[i, sequence].data_ptr() for i in range(2))
                params.gradient = parts[sequence].data_ptr()
                launch.on(current_stream(self.index))
        return parts


class BackwardInLegs:
    """Sequences of one length, whose chains rest in memory between the legs of their walks. What it is made of, shapes and options decide,
    so no GPU is needed to tell."""

    holds_tables = True

    def __init__(self, setup: BackwardSetup, device: torch.device) -> None:
        assert setup.plan is not None
        assert setup.legs is not None
        self.setup, self.plan, self.legs, self.device = setup, setup.plan, setup.legs, device

    @cached_property
    def tables(self) -> LegTables:
        return LegTables(self.plan, self.legs, 0, self.setup.tiles)

    @property
    def workspace_bytes(self) -> int:
        """With the states that rest in memory, or are worked on, at once."""
        dims, tiles = self.setup.layout.backward_dims, self.setup.tiles
        lasting = Workspace(**workspace_sizes(self.tables.sizes, tiles, dims)).bytes
        return lasting + 4 * most_states(self.legs)[0] * tile_size(*dims)

    def kernels(self) -> BackwardKernels:
        return leg_kernels(self.setup.variant, self.setup.layout.backward_dims[1])

    def run(self, tensors: tuple[Tensor, ...], call: Call, lse: Tensor, dlse: Tensor | None) -> Gradients:
        (q, k, v, dout, out), sinks = tensors, call.sinks
        backward = RankBackward(self.plan, self.legs, 0, self.setup.options, (dout, q, out), (lse, dlse))
        backward.take_keys(k, v, 0)
        walk_in_legs(backward, self.legs)
        dsinks = None
        if sinks is not None:
            dsinks = sum_in_order(backward.sink_gradients(backward.rows_of_sinks, sinks)).to(sinks.dtype)
        return self.setup.layout.without_padding(*backward.finish(), dsinks)
