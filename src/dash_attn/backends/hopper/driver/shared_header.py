"""Writes common/shared_with_python.cuh: the constants, enumerations and structures that Python and the kernels share.

Python decides; the kernels read this header, and static assertions compare how the compiler lays structures out.
"""

from functools import cache

from ....call import dropout
from ....scheduling.generators import FEW_KV_TILES
from ....scheduling.generators.alternating import MANY_MEMBERS, ONE_CAUSAL_CLASS, ONE_CLASS
from ....scheduling.generators.shift import LARGEST_BLOCK, SINGLE_CHAINS
from ....scheduling.problem import ROWS_OF_A_CHAIN
from ....scheduling.schedule import CACHED, FILLED, HAND_OVER, LATE, MANY_KV_TILES, SIXTEENTHS, TOO_LONG
from ..tiles import BACKWARD_DIMS, FORWARD_DIMS, backward_tiles, forward_tiles
from .parameters import RAGGED, STRUCTURES, Trouble
from .structures import declaration

NAME = "common/shared_with_python.cuh"
MASK_KINDS = ("Band", "Rows", "Blocks", "Packed", "Bits")


@cache
def shared_header() -> str:
    """The text of the header."""
    parts = [
        "// Written by backends/hopper/driver/shared_header.py: what Python and the kernels share.",
        '#pragma once\n#include "common/types.cuh"',
        _constants(),
        _generator(),
        _enumerations(),
        _tiles(),
        "\n".join(f"struct {name};" for name in STRUCTURES),
        *map(declaration, STRUCTURES.values()),
    ]
    return "\n\n".join(parts) + "\n"


def _constants() -> str:
    """Of the orders and placements that the device plans itself, for packed sequences."""
    found = {
        "FEW_KV_TILES": FEW_KV_TILES,
        "ONE_CLASS": ONE_CLASS,
        "ONE_CAUSAL_CLASS": ONE_CAUSAL_CLASS,
        "MANY_MEMBERS": MANY_MEMBERS,
        "ROWS_OF_A_CHAIN": ROWS_OF_A_CHAIN,
        "LARGEST_BLOCK": LARGEST_BLOCK,
        "SINGLE_CHAINS": SINGLE_CHAINS,
        "HAND_OVER": HAND_OVER,
        "MANY_KV_TILES": MANY_KV_TILES,
        "FILLED_WORKERS": FILLED[0],
        "FILLED_OF": FILLED[1],
        "CACHED": CACHED,
        "SIXTEENTHS": SIXTEENTHS,
        "LATE": LATE,
        "TOO_LONG": TOO_LONG,
        "RAGGED": RAGGED,
    }
    return "\n".join(f"constexpr int {name} = {value};" for name, value in found.items())


def _generator() -> str:
    """Of dropout."""
    words = {"PHILOX_MULTIPLIER": dropout.MULTIPLIER, "PHILOX_KEY_STEP": dropout.KEY_STEP}
    longs = {"MIX_GAMMA": dropout.GAMMA, "MIX_1": dropout.MIX_1, "MIX_2": dropout.MIX_2}
    lines = [f"constexpr int PHILOX_ROUNDS = {dropout.ROUNDS};"]
    lines += [f"constexpr u32 {name} = {value:#x}u;" for name, value in words.items()]
    lines += [f"constexpr u64 {name} = {value:#x}ull;" for name, value in longs.items()]
    return "\n".join(lines)


def _enumerations() -> str:
    kinds = ", ".join(MASK_KINDS)
    troubles = ", ".join(f"{trouble.name} = {trouble.value}" for trouble in Trouble)
    return f"enum class MaskKind {{ {kinds} }};\nenum class Trouble : int {{ None, {troubles} }};"


def _tiles() -> str:
    """Rows and shared memory, by head dim; in the backward by those of q and k, and of v."""
    backward = {dims: backward_tiles(*dims) for dims in BACKWARD_DIMS}
    lines = [
        _by_dims("backward_q_rows", {dims: tiles.q_rows for dims, tiles in backward.items()}),
        _by_dims("backward_kv_rows", {dims: tiles.kv_rows for dims, tiles in backward.items()}),
        _by_dims("backward_shared_bytes", {dims: tiles.shared_bytes for dims, tiles in backward.items()}),
        _by_dims("forward_kv_rows", {(dim,): forward_tiles(dim, 2).kv_rows for dim, _ in FORWARD_DIMS}),
    ]
    return "\n".join(lines)


def _by_dims(name: str, values: dict[tuple[int, int], int] | dict[tuple[int], int]) -> str:
    given = ("dim", "v_dim")[: len(next(iter(values)))]
    conditions = [(" && ".join(f"{one} == {dim}" for one, dim in zip(given, dims, strict=True)), value) for dims, value in values.items()]
    choices = "".join(f"{condition} ? {value} : " for condition, value in conditions)
    return f"__host__ __device__ constexpr int {name}({', '.join(f'int {one}' for one in given)}) {{ return {choices}0; }}"
