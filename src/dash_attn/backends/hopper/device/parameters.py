"""Kernel parameters as C structures, field by field like the .cuh files. A test compares the layouts with the compiler's."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_uint32, c_void_p

Pair = c_int * 2
Strides = c_int64 * 3


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, c_void_p) for name in names]


def _ints(*names: str) -> list[tuple[str, type]]:
    return [(name, c_int) for name in names]


class PlanTables(ctypes.Structure):
    _fields_ = [
        *_pointers("starts", "chain_runs", "chain_steps", "runs", "entries", "segments"),
        *_ints("kinds", "kv_tiles", "lanes", "tickets", "has_gangs", "rounds"),
        ("instances", Pair),
        ("heads_per_sequence", Pair),
        ("first_head", Pair),
        ("last_member_first", Pair),
    ]


class MaskParams(ctypes.Structure):
    _fields_ = [
        *_ints("q_len", "kv_len", "band_right"),
        ("band_width", c_uint32),
        *_pointers("rows", "blocks"),
        *_ints("block_q", "block_kv", "block_columns"),
    ]


class TilePlaces(ctypes.Structure):
    _fields_ = [
        *_ints("batch", "q_heads", "group", "q_len", "tokens", "head_tiles"),
        *_pointers("sequences", "tile_places"),
    ]


class BackwardParams(ctypes.Structure):
    _fields_ = [
        *_pointers("lse", "delta", "dq", "semaphores", "next_ticket", "tickets", "report"),
        ("most_polls", c_uint32),
        *_ints("call", "group", "head_tiles"),
        *((name, c_float) for name in ("scale_log2", "scale", "masked_score", "cap_scale")),
        ("mask", MaskParams),
        *_pointers("runs", "entries", "chains", "record", "clocks"),
        ("record_ranks", c_uint32),
    ]


class PreprocessParams(ctypes.Structure):
    _fields_ = [
        *_pointers("out", "grad_out"),
        ("out_strides", Strides),
        ("grad_strides", Strides),
        *_pointers("lse", "grad_lse", "lse_log2", "delta", "dq_to_zero", "semaphores", "next_ticket", "tickets"),
        *_ints("v_dim", "kv_rows", "tile_columns"),
        ("tiles", TilePlaces),
        ("mask", MaskParams),
        ("plan", PlanTables),
    ]


class PostprocessParams(ctypes.Structure):
    _fields_ = [
        *_pointers("dq_accumulator", "q_ranks", "semaphores", "dq"),
        ("strides", Strides),
        *_ints("dim"),
        ("scale", c_float),
        *_pointers("report"),
        ("most_polls", c_uint32),
        *_ints("call"),
        ("tiles", TilePlaces),
    ]


class SinkGradientParams(ctypes.Structure):
    _fields_ = [*_pointers("sinks", "lse_log2", "delta", "gradient"), *_ints("sequences"), ("tiles", TilePlaces)]


class PackedParams(ctypes.Structure):
    _fields_ = [
        *_pointers("cu_q", "cu_k"),
        *_ints("count", "q_tokens", "k_tokens", "q_longest", "k_longest"),
        *_ints("heads", "group", "head_offset", "head_tiles", "chain_rows", "workers"),
        ("mask", MaskParams),
        *_pointers("sequences", "parts", "tile_places", "q_ranks", "chains", "tickets", "ticket_count", "report"),
        *_ints("call"),
    ]


class PackedTilesParams(ctypes.Structure):
    _fields_ = [*_ints("count", "tile_room"), ("mask", MaskParams), *_pointers("sequences", "parts", "tiles", "next_ticket")]


class VisitParams(ctypes.Structure):
    """struct VisitTables of forward/config.cuh."""

    _fields_ = _pointers("q_order", "first_runs", "runs", "visits")


class ForwardParams(ctypes.Structure):
    _fields_ = [
        *_pointers("lse", "sinks", "next_ticket"),
        ("last_ticket", c_uint32),
        *_ints("batch", "q_heads", "group", "places", "tokens", "heads_side_by_side", "last_heads"),
        ("scale_log2", c_float),
        ("cap_scale", c_float),
        ("mask", MaskParams),
        ("visits", VisitParams),
        *_pointers("sequences", "tiles"),
    ]
