"""Every kernel variant that the Hopper backend can ask for, and what an assembler may not say of it."""

from __future__ import annotations

import re

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
LEGS = [  # of devices that share a sequence, with the masks that rank_masks.py allows
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
        ("backward/attention.cuh", f"attention_backward_modified<{dtype}, {dim}, {v_dim}, {softcap}, MaskKind::{mask}, {modifiers}>")
        for dtype in DTYPES
        for dim, v_dim in BACKWARD_DIMS
        for mask in MODIFIED_MASKS
        for softcap, modifiers in MODIFIERS
    ),
    *(
        ("forward/attention.cuh", f"attention_forward_modified<{dtype}, {dim}, {consumers}, {softcap}, MaskKind::{mask}, {modifiers}>")
        for dtype in DTYPES
        for dim in DIMS
        for consumers in CONSUMER_CHOICES[dim]
        for mask in MODIFIED_MASKS
        for softcap, modifiers in MODIFIERS
    ),
]
FEW = [  # of dropout and ALiBi, and of legs, which run the code of the backward: what `make test` compiles
    "attention_backward_of_legs<bf16, 128, 128, false, MaskKind::Band>",
    "attention_backward_of_legs<bf16, 256, 256, true, MaskKind::Rows>",
    "attention_backward_modified<bf16, 64, 64, false, MaskKind::Packed, true, false>",
    "attention_backward_modified<bf16, 128, 128, false, MaskKind::Band, true, true>",
    "attention_forward_modified<bf16, 64, 3, false, MaskKind::Packed, true, true>",
]
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
    *(("planning/chains.cuh", f"packed_layout<{q}, {kv}, true>") for q, kv in sorted(TILES)),
    *(("planning/chains.cuh", f"packed_plan<{q}, {kv}>") for q, kv in sorted(TILES)),
    *(("planning/chains.cuh", f"packed_layout<{q}, {kv}, false>") for q, kv in sorted(FORWARD_SHAPES)),
    *(("planning/forward_tiles.cuh", f"packed_tiles<{q}, {kv}>") for q, kv in sorted(FORWARD_SHAPES)),
    *(("planning/mask_bits.cuh", f"pack_mask_bits<{q}, {kv}, true>") for q, kv in sorted(FORWARD_SHAPES)),
    *(("planning/mask_bits.cuh", f"pack_mask_bits<{q}, {kv}, false>") for q, kv in sorted(TILES)),
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
    *(("backward/attention.cuh", name) for name in LEGS),
    *MODIFIED,
    *(("forward/attention.cuh", name) for name in FORWARD),
    *(("decode/attention.cuh", name) for name in DECODE),
    *(("decode/cluster.cuh", name) for name in CLUSTER),
    ("decode/append.cuh", "append_to_cache"),
    *dict.fromkeys(HELPERS),
]
BF16_BACKWARD = [variant for variant in VARIANTS if variant[1].startswith("attention_backward<bf16")]
OTHERS = [variant for variant in VARIANTS if variant not in BF16_BACKWARD]


def choices(name: str) -> set[tuple[str, int, str]]:
    """What a kernel is made for, place by place. The two numbers of an attention kernel, a shape, are one choice."""
    kernel, _, given = name.rstrip(">").partition("<")
    values = given.split(", ")
    if "MaskKind" in given:
        values[1:3] = [", ".join(values[1:3])]
    return {(kernel, place, value) for place, value in enumerate(values)}


def multiplies(name: str) -> bool:
    return name.startswith("attention_")


def is_one_of_few(name: str) -> bool:
    return "_modified<" in name or "_of_legs<" in name


def always() -> list[str]:
    """What `make test` compiles: as few as have every choice of every kernel that multiplies tiles, those without softcap first, and one
    of each other kernel. `make test-all` and `make kernels` compile all. Float16 differs from bfloat16 in conversions alone, dropout and
    ALiBi stand beside any other choice.
    """
    names = sorted((name for _, name in VARIANTS if multiplies(name) and not is_one_of_few(name)), key=lambda name: ", true, Mask" in name)
    missing = set().union(*map(choices, names))
    kept = list({name.split("<")[0]: name for _, name in VARIANTS if not multiplies(name)}.values())
    while missing:
        kept.append(max(names, key=lambda name: (len(choices(name) & missing), "<f16" not in name)))
        missing -= choices(kept[-1])
    return kept + FEW


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
