"""Kernel parameters as C structures, field by field like the .cuh files. A test compares the layouts with the compiler's."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_uint32, c_void_p

Pair = c_int * 2
Strides = c_int64 * 3


class PlanTables(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("starts", "chain_runs", "chain_steps", "runs", "entries", "segments")),
        *((name, c_int) for name in ("kinds", "kv_tiles", "lanes", "tickets", "has_gangs")),
        ("instances", Pair),
        ("heads_per_sequence", Pair),
        ("first_head", Pair),
        ("last_member_first", Pair),
    ]


class MaskParams(ctypes.Structure):
    _fields_ = [
        *((name, c_int) for name in ("q_len", "kv_len", "band_top")),
        ("band_width", c_uint32),
        ("rows", c_void_p),
        ("blocks", c_void_p),
        *((name, c_int) for name in ("block_q", "block_kv", "block_columns")),
    ]


class BackwardParams(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("lse", "delta", "dq", "semaphores", "next_ticket", "tickets", "hang_report")),
        ("most_polls", c_uint32),
        *((name, c_int) for name in ("kv_heads", "group", "q_tiles")),
        *((name, c_float) for name in ("scale_log2", "scale", "masked_score")),
        ("mask", MaskParams),
        ("plan", PlanTables),
        *((name, c_void_p) for name in ("record", "clocks")),
    ]


class PreprocessParams(ctypes.Structure):
    _fields_ = [
        ("out", c_void_p),
        ("grad_out", c_void_p),
        ("out_strides", Strides),
        ("grad_strides", Strides),
        *((name, c_void_p) for name in ("lse", "lse_log2", "delta", "dq_to_zero", "semaphores", "next_ticket", "tickets")),
        *((name, c_int) for name in ("batch", "q_heads", "group", "q_len", "padded_len", "q_tiles")),
        ("plan", PlanTables),
    ]


class PostprocessParams(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("dq_accumulator", "ranks_per_q_tile", "dq")),
        ("strides", Strides),
        *((name, c_int) for name in ("q_heads", "q_len", "q_tiles")),
        ("scale", c_float),
    ]


class VisitParams(ctypes.Structure):
    """struct VisitTables of forward_config.cuh."""

    _fields_ = [(name, c_void_p) for name in ("q_order", "first_runs", "runs", "visits")]


class ForwardParams(ctypes.Structure):
    _fields_ = [
        ("lse", c_void_p),
        ("next_ticket", c_void_p),
        *((name, c_int) for name in ("batch", "q_heads", "group", "places", "tickets", "heads_side_by_side")),
        ("scale_log2", c_float),
        ("mask", MaskParams),
        ("visits", VisitParams),
    ]
