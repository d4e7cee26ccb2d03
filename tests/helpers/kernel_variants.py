"""Every kernel variant that the Hopper backend can ask for, and what an assembler may not say of it."""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

from dash_attn.backends.hopper import tiles as shapes
from dash_attn.backends.hopper.tiles import CONSUMER_CHOICES, threads_per_row

DTYPES = ("bf16", "f16")
DIMS = shapes.KERNEL_DIMS
BACKWARD_DIMS = shapes.BACKWARD_DIMS  # of q and k, and of v
MASKS = ("Band", "Rows", "Blocks", "Packed", "Bits")
FLAGS = ("true", "false")
TILES = {(shapes.backward_tiles(*dims).q_rows, shapes.backward_tiles(*dims).kv_rows) for dims in BACKWARD_DIMS}
FORWARD_SHAPES = {(64 * c, shapes.forward_tiles(dim, c).kv_rows) for dim in DIMS for c in CONSUMER_CHOICES[dim]}
BACKWARD = [
    f"attention_backward<{dtype}, {dim}, {v_dim}, {ordered}, {softcap}, MaskKind::{mask}>"
    for dtype in DTYPES
    for dim, v_dim in BACKWARD_DIMS
    for ordered, softcap in (("true", "false"), ("true", "true"), ("false", "false"))  # what support.py allows
    for mask in MASKS
]
RECORDING = [f"attention_backward<bf16, {dim}, {v_dim}, true, false, MaskKind::Band, true>" for dim, v_dim in BACKWARD_DIMS]
LEGS = [  # of devices that share a sequence, with the masks that device_masks.py allows
    f"attention_backward_of_legs<{dtype}, {dim}, {v_dim}, {softcap}, MaskKind::{mask}>"
    for dtype in DTYPES
    for dim, v_dim in BACKWARD_DIMS
    for softcap in FLAGS
    for mask in ("Band", "Rows")
]
FORWARD = [
    f"attention_forward<{dtype}, {dim}, {consumers}, {softcap}, MaskKind::{mask}{'' if dim == v_dim else f', {v_dim}'}>"
    for dtype in DTYPES
    for dim, v_dim in shapes.FORWARD_DIMS
    for consumers in CONSUMER_CHOICES[shapes.kernel_dim(dim)]
    for softcap in FLAGS
    for mask in MASKS
]
# Softcap, then dropout and ALiBi, and masks: what support.py allows.
MODIFIED_MASKS = [mask for mask in MASKS if mask != "Bits"]
MODIFIERS = [
    (softcap, both) for softcap in FLAGS for both in ("true, false", "false, true", "true, true") if "false" in (softcap, *both.split(", "))
]
MODIFIED = [
    *(
        ("backward/modified.cuh", f"attention_backward_modified<{dtype}, {dim}, {v_dim}, {softcap}, MaskKind::{mask}, {modifiers}>")
        for dtype in DTYPES
        for dim, v_dim in BACKWARD_DIMS
        for mask in MODIFIED_MASKS
        for softcap, modifiers in MODIFIERS
    ),
    *(
        ("forward/modified.cuh", f"attention_forward_modified<{dtype}, {dim}, {consumers}, {softcap}, MaskKind::{mask}, {modifiers}>")
        for dtype in DTYPES
        for dim in DIMS
        for consumers in CONSUMER_CHOICES[dim]
        for mask in MODIFIED_MASKS
        for softcap, modifiers in MODIFIERS
    ),
]
FEW_MODIFIED = {  # that `make test` compiles
    "attention_backward_modified<bf16, 64, 64, false, MaskKind::Packed, true, false>",
    "attention_backward_modified<bf16, 128, 128, false, MaskKind::Band, true, true>",
    "attention_forward_modified<bf16, 64, 3, false, MaskKind::Packed, true, true>",
}
HELPERS = [
    *(
        (
            "backward/preprocess.cuh",
            f"backward_preprocess<{dtype}, {threads_per_row(dims[1])}, {shapes.backward_tiles(*dims).q_rows}, {packed}>",
        )
        for dtype in DTYPES
        for dims in BACKWARD_DIMS
        for packed in FLAGS
    ),
    *(
        ("backward/postprocess.cuh", f"backward_postprocess<{dtype}, {dim}, {v_dim}, {packed}>")
        for dtype in DTYPES
        for dim, v_dim in BACKWARD_DIMS
        for packed in FLAGS
    ),
    *(("backward/ending.cuh", f"end_trips<{dim}, {v_dim}>") for dim, v_dim in BACKWARD_DIMS),
    *(("backward/modifier_notes.cuh", f"modifier_notes<{packed}>") for packed in FLAGS),
    *(("backward/sink_gradient.cuh", f"sink_gradient<{rows}, {packed}>") for rows in (64, 128) for packed in FLAGS),
    *(("device_planning/chains.cuh", f"packed_layout<{q}, {kv}, true>") for q, kv in sorted(TILES)),
    *(("device_planning/chains.cuh", f"packed_plan<{q}, {kv}>") for q, kv in sorted(TILES)),
    *(("device_planning/chains.cuh", f"packed_layout<{q}, {kv}, false>") for q, kv in sorted(FORWARD_SHAPES)),
    *(("device_planning/forward_tiles.cuh", f"packed_tiles<{q}, {kv}>") for q, kv in sorted(FORWARD_SHAPES)),
    *(("device_planning/mask_bits.cuh", f"pack_mask_bits<{q}, {kv}, true>") for q, kv in sorted(FORWARD_SHAPES)),
    *(("device_planning/mask_bits.cuh", f"pack_mask_bits<{q}, {kv}, false>") for q, kv in sorted(TILES)),
    ("ledger/bit_sums.cuh", "bit_sums"),
]
DECODE = [f"attention_decode<{dtype}, {dim}, {softcap}>" for dtype in DTYPES for dim in DIMS for softcap in FLAGS]
CLUSTER = [
    f"attention_decode_cluster<{dtype}, {dim}, {columns}, {softcap}>"
    for dtype in DTYPES
    for dim, columns, _ in shapes.CLUSTERS
    for softcap in FLAGS
]
VARIANTS = [
    *(("backward/attention.cuh", name) for name in (*BACKWARD, *RECORDING)),
    *(("backward/legs.cuh", name) for name in LEGS),
    *MODIFIED,
    *(("forward/attention.cuh", name) for name in FORWARD),
    *(("decode/attention.cuh", name) for name in DECODE),
    *(("decode/cluster.cuh", name) for name in CLUSTER),
    ("decode/append.cuh", "append_to_cache"),
    *dict.fromkeys(HELPERS),
]
BF16_BACKWARD = [variant for variant in VARIANTS if variant[1].startswith("attention_backward<bf16")]
OTHERS = [variant for variant in VARIANTS if variant not in BF16_BACKWARD]
# Not those of decode, which are few, and not those of dropout and ALiBi, which are many.
ATTENTION = [name for _, name in VARIANTS if "MaskKind" in name and "_modified<" not in name]


def pairs(name: str) -> set[tuple[Any, ...]]:
    """Every two choices of an attention kernel. Its two numbers, a shape, are one choice."""
    kernel, given = name.rstrip(">").split("<")
    dtype, dim, other, *rest = given.split(", ")
    return {(kernel, *two) for two in combinations(enumerate((dtype, f"{dim}, {other}", *rest)), 2)}


def thinned(names: list[str], start: list[str]) -> list[str]:
    """`start`, and as few more as bring together every two choices that one of the names has."""
    kept = list(start)
    missing = set().union(*map(pairs, names)).difference(*map(pairs, start))
    while missing:
        kept.append(max(names, key=lambda name: len(pairs(name) & missing)))
        missing -= pairs(kept[-1])
    return kept


def is_usual(name: str) -> bool:
    """Ordered, without softcap, and of a band mask, or of a boolean one."""
    plain = ", true, false, Mask" if name.startswith("attention_backward<") else ", false, Mask"
    return plain in name and ("Band" in name or "Bits" in name)


def is_twin(name: str) -> bool:
    """A float16 kernel of decode, or before or after the backward: its bfloat16 twin differs in conversions alone."""
    return name.startswith(("attention_decode", "backward_preprocess", "backward_postprocess")) and "<f16" in name


def is_like_another(name: str) -> bool:
    """Legs run the backward's code, and these shapes that of 128: their usual variants stand for the others."""
    return "_of_legs<" in name or "<bf16, 80, " in name or "<bf16, 96, " in name


# Those of boolean masks differ from those of block maps in few instructions: the shortest on registers stand for all.
FEW_BITS = ("forward<bf16, 64, 3, f", "forward<bf16, 256, 2, f", "backward<bf16, 128, 128, true, f", "backward<bf16, 192, 128, true, f")
MORE_BITS = {name for name in ATTENTION if "Bits" in name and not name.removeprefix("attention_").startswith(FEW_BITS)}


def always() -> list[str]:
    """What `make test` compiles; `make test-all` and `make kernels` compile all. Float16 differs from bfloat16 in conversions alone."""
    usual = [name for name in ATTENTION if is_usual(name) and name not in MORE_BITS]
    to_meet = [name for name in ATTENTION if "<bf16" in name and "Bits" not in name and not is_like_another(name)]
    in_bf16 = thinned(to_meet, [name for name in usual if "<bf16" in name])
    in_f16 = [name for name in usual if "<f16, 128, " in name and "Band" in name]
    others = [name for _, name in VARIANTS if name not in ATTENTION and not is_twin(name)]
    return in_bf16 + in_f16 + [name for name in others if "_modified<" not in name or name in FEW_MODIFIED]


ALWAYS = set(always())


def allowed_bytes(name: str) -> int:
    """Of local memory. Dropout or ALiBi with softcap, or with masks that are looked up, is rare: a few registers may spill there."""
    if "_modified<" not in name:
        return 0
    return 64 if ", true, MaskKind" in name else 16 if "Rows" in name or "Blocks" in name else 0


def assembler_complaints(log: str, allowed: int = 0) -> list[str]:
    """Spills, local memory, and the C75xx warnings with which ptxas says that it serialised wgmma or ignored setmaxnreg."""
    bad = []
    for line in log.splitlines():
        sizes = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", line)
        if any(int(size) > allowed for size in sizes) or "C75" in line or "warning" in line.lower():
            bad.append(line.strip())
    return bad
