"""Kernels of a device that shares a sequence, in numpy on host memory: what is behind the launches of calls/rank_backward.py.

They read the same parameters, records and tables as the kernels do, by address, and refuse what lies outside of the memory that was
made for it. Sums are in float64 where the kernels' are in float32; states have a layout of their own.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count, product
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

parameters = import_module("dash_attn.backends.hopper.driver.parameters")
tiles_of = import_module("dash_attn.backends.hopper.tiles").backward_tiles

LOG2_E = 1.4426950408889634
FAR = 1e30
TYPES: dict[Any, Any] = {np.float32: ctypes.c_float, np.int32: ctypes.c_int32}


@dataclass
class Memory:
    """What may be read and written: (first address, end, name)."""

    parts: list[tuple[int, int, str]] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)

    def add(self, name: str, first: int, size: int) -> None:
        self.parts.append((first, first + size, name))

    def add_tensor(self, name: str, tensor: Tensor) -> Tensor:
        self.kept.append(tensor)  # its address is not given to another one
        self.add(name, tensor.data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    def at(self, name: str, address: int | None, elements: int, kind: Any = np.float32) -> NDArray[Any]:
        """Elements from an address on, all of them in the part of that name. Without a name: memory that nobody told of."""
        assert address is not None, f"no {name}"
        if not name:
            return np.ctypeslib.as_array((TYPES[kind] * elements).from_address(address))
        end = address + 4 * elements
        assert any(first <= address and end <= last for first, last, owner in self.parts if owner == name), f"outside of {name}"
        return np.ctypeslib.as_array((TYPES[kind] * elements).from_address(address))


class EmulatedMap:
    """A tensor map: its address is its number."""

    numbers = count(1)
    made: ClassVar[dict[int, EmulatedMap]] = {}

    def __init__(self, tensor: Tensor, rows: int) -> None:
        self.tensor, self.rows, self.address = tensor, rows, next(self.numbers)
        self.made[self.address] = self

    def load(self, plane: int, head: int, row: int) -> NDArray[np.float64]:
        """A tile; zeros beyond the end."""
        batch, _, heads, dim = self.tensor.shape
        assert 0 <= plane < batch
        assert 0 <= head < heads
        assert row >= 0
        tile = np.zeros((self.rows, dim))
        found = self.tensor[plane, row : row + self.rows, head].double().numpy()
        tile[: len(found)] = found
        return tile


@dataclass
class EmulatedDriver:
    """Instead of load_kernel: the kernels of this module by name."""

    memory: Memory = field(default_factory=Memory)
    launched: list[tuple[str, int]] = field(default_factory=list)

    def load(self, device: int, header: str, name: str, threads: int, shared_bytes: int) -> EmulatedKernel:
        base, arguments = name[:-1].split("<")
        return EmulatedKernel(self, base, arguments.split(", "))


@dataclass
class EmulatedKernel:
    driver: EmulatedDriver
    name: str
    arguments: list[str]

    def prepare(self, grid: int, addresses: list[int], cooperative: bool = False, early: bool = False) -> EmulatedLaunch:
        assert grid > 0
        return EmulatedLaunch(self, grid, addresses)


@dataclass
class EmulatedLaunch:
    kernel: EmulatedKernel
    grid: int
    addresses: list[int]

    def on(self, stream: Any) -> None:
        self.kernel.driver.launched.append((self.kernel.name, self.grid))
        KERNELS[self.kernel.name](self.kernel.driver.memory, self.kernel.arguments, self.grid, self.addresses)


def read(kind: str, address: int) -> Any:
    return getattr(parameters, kind).from_address(address)


def structures(memory: Memory, kind: str, name: str, address: int, number: int) -> Any:
    structure = getattr(parameters, kind)
    memory.at(name, address, structure.bytes() // 4 * number, np.int32)
    return (structure * number).from_address(address)


def rows_of(places: Any, tile: int, q_rows: int) -> tuple[int, int, int, int]:
    """Sequence, query head, first row and how many rows there are."""
    head_of_batch, q_tile = divmod(tile, places.head_tiles)
    return *divmod(head_of_batch, places.q_heads), q_tile * q_rows, min(q_rows, places.q_len - q_tile * q_rows)


def preprocess(memory: Memory, arguments: list[str], grid: int, addresses: list[int]) -> None:
    p, q_rows = read("PreprocessParams", addresses[0]), int(arguments[2])
    assert p.plan.tickets == 0
    assert p.dq_to_zero is None
    places = p.tiles
    tiles = places.batch * places.q_heads * places.head_tiles
    assert grid * 256 >= tiles * q_rows * int(arguments[1])
    memory.at("next_ticket", p.next_ticket, 2, np.int32)[:] = 0
    memory.at("semaphores", p.semaphores, p.semaphore_count, np.int32)[:] = 0
    lse_log2, delta = (memory.at(name, at, tiles * q_rows) for name, at in (("lse", p.lse_log2), ("delta", p.delta)))
    lse = memory.at("rows", p.lse, places.batch * places.q_heads * places.q_len).reshape(places.batch, places.q_heads, places.q_len)
    dlse = None if p.grad_lse is None else memory.at("rows", p.grad_lse, lse.size).reshape(lse.shape)
    out, dout = (whole_tensor(memory, address) for address in (p.out, p.grad_out))
    lse_log2[:], delta[:] = FAR, 0
    for tile in range(tiles):
        sequence, head, first, rows = rows_of(places, tile, q_rows)
        here, own = slice(tile * q_rows, tile * q_rows + rows), slice(first, first + rows)
        some = lse[sequence, head, own]
        delta[here] = (out[sequence, own, head] * dout[sequence, own, head]).sum(-1).numpy()
        if dlse is not None:
            delta[here] -= np.where(np.isinf(some), 0, dlse[sequence, head, own])
        lse_log2[here] = np.where(np.isinf(some), FAR, some * LOG2_E)


def whole_tensor(memory: Memory, address: int) -> Tensor:
    """The tensor that begins there."""
    found: Tensor = next(x for x in memory.kept if isinstance(x, Tensor) and x.data_ptr() == address and x.ndim == 4)
    return found.double()


def steps_of(memory: Memory, p: Any, record: Any) -> list[tuple[int, int, int]]:
    """(Q tile, turn, partial) of a leg, as common/plan_tables.cuh walks them."""
    found: list[tuple[int, int, int]] = []
    run = record.first_run
    while len(found) < record.walk >> 1:
        line = structures(memory, "Run", "runs", p.runs + 32 * run, 1)[0]
        assert line.length > 0
        for i in range(line.length):
            if line.entries >= 0:
                entry = structures(memory, "Step", "entries", p.entries + 12 * (line.entries + i), 1)[0]
                found.append((entry.q_tile, entry.turn, entry.partial))
            else:
                assert line.turn_mul * i + line.turn_add >= 0
                turn = (line.turn_mul * i + line.turn_add) // line.turn_div
                found.append((line.q_first + i * line.q_stride, turn, line.partial))
        run += 1
    assert len(found) == record.walk >> 1, "a run goes on behind its leg"
    return found


class State:
    """dK and dV of a chain in a state or sum."""

    def __init__(self, memory: Memory, name: str, address: int, number: int, dims: tuple[int, int]) -> None:
        self.rows = tiles_of(*dims).kv_rows
        size = self.rows * sum(dims)
        values = memory.at(name, address + 4 * size * number, size)
        dv, dk = np.split(values, [self.rows * dims[1]])
        self.dk, self.dv = dk.reshape(self.rows, dims[0]), dv.reshape(self.rows, dims[1])


def walk_legs(memory: Memory, arguments: list[str], grid: int, addresses: list[int]) -> None:
    dims = int(arguments[1]), int(arguments[2])
    maps = [EmulatedMap.made[address] for address in addresses[:4]]
    p, legs = read("BackwardParams", addresses[4]), read("LegParams", addresses[5])
    counter = memory.at("counters", p.next_ticket, 2, np.int32)
    assert counter[0] == 0, "a unit runs once"
    assert grid <= counter[1]
    counter[0] = counter[1]
    for record in structures(memory, "ChainRecord", "records", p.tickets, int(counter[1])):
        assert legs.states in (None, p.sums)
        walk_leg(memory, p, legs, record, maps, dims, arguments[4])


def walk_leg(memory: Memory, p: Any, legs: Any, record: Any, maps: list[EmulatedMap], dims: tuple[int, int], kind: str) -> None:
    q_map, k_map, v_map, do_map = maps
    shapes = tiles_of(*dims)
    assert (record.gang_end, record.members, record.turn, record.q_shift) == (0, 1, 0, 0)
    slot, odd = divmod(record.first_sum - p.first_sum, shapes.sum_pieces)
    assert odd == 0
    state = State(memory, "states", p.sums, slot, dims)
    dim, v_dim = k_map.tensor.shape[-1], v_map.tensor.shape[-1]
    dk, dv = (np.zeros((shapes.kv_rows, n)) for n in (dim, v_dim))
    if legs.states is not None:
        if legs.awaited >= 0:
            assert legs.overlaps
            came = p.semaphores + 4 * (legs.awaited + record.first_sum - p.first_sum)
            assert (memory.at("semaphores", came, shapes.sum_pieces, np.int32) == 1).all(), "nobody will store this state"
        dk[:], dv[:] = state.dk[:, :dim], state.dv[:, :v_dim]
    k, v = (m.load(record.kv_plane, record.kv_head - legs.first_kv_head, record.kv_row) for m in (k_map, v_map))
    steps = steps_of(memory, p, record)
    assert len(steps) == record.steps
    for q_tile, turn, partial in steps:
        q, dout = (m.load(record.q_plane, record.q_head, q_tile * shapes.q_rows) for m in (q_map, do_map))
        tile = record.first_dq_tile + q_tile
        assert tile < p.first_sum
        assert record.first_sum >= p.first_sum
        lse, delta = (memory.at(n, at + 4 * tile * shapes.q_rows, shapes.q_rows) for n, at in (("lse", p.lse), ("delta", p.delta)))
        scores = q @ k.T * p.scale
        if partial:
            keeps = band if kind == "MaskKind::Band" else row_bounds
            scores = np.where(keeps(memory, p, record, q_tile * shapes.q_rows, scores.shape), scores, -1e30)
        weights = np.exp2(scores * LOG2_E - lse[:, None])
        dscores = weights * (dout @ v.T - delta[:, None])
        dv += weights.T @ dout
        dk += dscores.T @ q
        land(memory, p, tile, turn, (dscores @ k).astype(np.float32), shapes)
    state.dk[:], state.dv[:] = 0, 0
    state.dk[:, :dim], state.dv[:, :v_dim] = dk, dv
    stored = memory.at("semaphores", p.semaphores + 4 * record.first_sum, shapes.sum_pieces, np.int32)
    assert (stored == 0).all(), "two chains have one state"
    stored[:] = 1


def row_bounds(memory: Memory, p: Any, record: Any, first_row: int, shape: tuple[int, int]) -> NDArray[np.bool_]:
    rows = memory.at("rows", p.mask.rows, 2 * p.mask.q_len, np.int32).reshape(-1, 2)[first_row : first_row + shape[0]]
    bounds = np.zeros((shape[0], 2), dtype=np.int64)
    bounds[: len(rows)] = rows
    key = np.arange(shape[1])
    kept: NDArray[np.bool_] = (record.kv_row + key >= bounds[:, :1]) & (record.kv_row + key < bounds[:, 1:]) & (key < record.keys)
    return kept


def band(memory: Memory, p: Any, record: Any, first_row: int, shape: tuple[int, int]) -> NDArray[np.bool_]:
    """As KeyMask of common/mask.cuh."""
    query, key = first_row + np.arange(shape[0])[:, None], np.arange(shape[1])
    inside = record.band_top - key + query
    kept: NDArray[np.bool_] = (inside >= 0) & (inside <= p.mask.band_width) & (key < record.keys)
    return kept


def land(memory: Memory, p: Any, tile: int, turn: int, value: NDArray[np.float32], shapes: Any) -> None:
    """Each turn behind the one before: a kernel would wait, here nobody else would come."""
    semaphore = memory.at("semaphores", p.semaphores + 4 * tile, 1, np.int32)
    assert semaphore[0] == turn, f"turn {turn} of dQ tile {tile} after {semaphore[0]} turns"
    size = shapes.q_rows * shapes.columns
    dq = memory.at("dq", p.dq + 4 * tile * size, size).reshape(shapes.q_rows, shapes.columns)[:, : value.shape[1]]
    dq[:] = value if turn == 0 else dq + value
    semaphore[0] += 1


def end_trips(memory: Memory, arguments: list[str], grid: int, addresses: list[int]) -> None:
    dims = int(arguments[0]), int(arguments[1])
    p, shapes = read("EndingParams", addresses[0]), tiles_of(*dims)
    number, odd = divmod(grid, shapes.kv_rows * sum(dims) // 1024)
    assert odd == 0
    for ending in reversed(structures(memory, "EndingRecord", "endings", p.endings, number)):  # blocks have no order
        semaphores = memory.at("semaphores", p.semaphores + 4 * ending.sum * shapes.sum_pieces, shapes.sum_pieces, np.int32)
        assert (semaphores == ending.turn).all(), f"turn {ending.turn} after {semaphores[0]}"
        total = State(memory, "sums", p.sums, ending.sum, dims)
        for i in range(ending.count):
            state = State(memory, "states", p.states, ending.first + i * ending.stride, dims)
            for to, part in ((total.dk, state.dk), (total.dv, state.dv)):
                to[:] = part if ending.turn + i == 0 else to + part
        semaphores[:] = ending.turn + ending.count


def postprocess(memory: Memory, arguments: list[str], grid: int, addresses: list[int]) -> None:
    dims = int(arguments[1]), int(arguments[2])
    p, shapes = read("PostprocessParams", addresses[0]), tiles_of(*dims)
    places, sums = p.tiles, p.sums
    tiles = places.batch * places.q_heads * places.head_tiles
    assert grid == tiles + 2 * places.batch * sums.kv_heads * sums.head_chains * (shapes.kv_rows // 64)
    semaphores = memory.at("semaphores", p.semaphores, tiles, np.int32)
    turns = np.tile(memory.at("q_turns", p.q_turns, places.head_tiles, np.int32), places.batch * places.q_heads)
    assert (semaphores == turns).all()
    dq = made_tensor(p.dq, arguments[0], (places.batch, places.q_len, places.q_heads, p.dim))
    size = shapes.q_rows * shapes.columns
    for tile in range(tiles):
        sequence, head, first, rows = rows_of(places, tile, shapes.q_rows)
        found = memory.at("dq", p.dq_accumulator + 4 * tile * size, size).reshape(shapes.q_rows, -1)[:rows, : p.dim]
        dq[sequence, first : first + rows, head] = torch.from_numpy((found * p.scale) if turns[tile] else found * 0)
    finish_sums(memory, p, shapes, arguments[0], dims)


def made_tensor(address: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """A contiguous one of 16-bit numbers."""
    elements = (ctypes.c_uint16 * math.prod(shape)).from_address(address)
    return torch.frombuffer(elements, dtype={"bf16": torch.bfloat16, "f16": torch.float16}[dtype]).view(shape)


def finish_sums(memory: Memory, p: Any, shapes: Any, dtype: str, dims: tuple[int, int]) -> None:
    sums = p.sums
    rows_and_heads = p.tiles.batch, sums.kv_len, sums.kv_heads
    dk, dv = (made_tensor(at, dtype, (*rows_and_heads, dim)) for at, dim in ((sums.dk, sums.dk_dim), (sums.dv, sums.dv_dim)))
    for sequence, head, kv_tile in product(range(p.tiles.batch), range(sums.kv_heads), range(sums.head_chains)):
        first = ((sequence * sums.kv_heads + head) * sums.head_chains + kv_tile) * sums.count
        parts = []
        for number, added in enumerate(list(sums.parts)[: sums.count]):
            at = p.semaphores + 4 * (sums.first_sum + (first + number) * shapes.sum_pieces)
            assert (memory.at("semaphores", at, shapes.sum_pieces, np.int32) == added).all()
            parts.append(State(memory, "sums", sums.sums, first + number, dims))
        rows = slice(kv_tile * shapes.kv_rows, min((kv_tile + 1) * shapes.kv_rows, sums.kv_len))
        here = rows.stop - rows.start
        dk[sequence, rows, head] = torch.from_numpy(sum(part.dk[:here, : sums.dk_dim] for part in parts) * p.scale)
        dv[sequence, rows, head] = torch.from_numpy(sum(part.dv[:here, : sums.dv_dim] for part in parts))


def sink_gradient(memory: Memory, arguments: list[str], grid: int, addresses: list[int]) -> None:
    p, q_rows = read("SinkGradientParams", addresses[0]), int(arguments[0])
    assert p.sequences == 1
    heads, tiles, length = p.tiles.q_heads, p.tiles.head_tiles, p.tiles.q_len
    assert grid == heads
    shape = heads, tiles * q_rows
    lse, delta = (memory.at("", at, heads * tiles * q_rows).reshape(shape)[:, :length] for at in (p.lse_log2, p.delta))
    sinks = memory.at("", p.sinks, heads)
    memory.at("", p.gradient, heads)[:] = -(np.exp2(sinks[:, None] * LOG2_E - lse) * delta).sum(1)


KERNELS: dict[str, Any] = {
    "backward_preprocess": preprocess,
    "attention_backward_of_legs": walk_legs,
    "end_trips": end_trips,
    "backward_postprocess": postprocess,
    "sink_gradient": sink_gradient,
}
