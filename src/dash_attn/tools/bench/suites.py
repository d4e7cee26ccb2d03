"""The shapes a benchmark times, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

from .shape import PASSES, Shape

__all__ = ["DECODE_SUITES", "EQUAL_HEADS_SUITES", "FLEX_SUITES", "HOST_SUITE", "MASKS", "PASSES", "SUITES", "Shape", "Suite", "choose"]

TOKENS = 16384  # batch x seqlen
MASKS = ("causal", "full")


@dataclass(frozen=True)
class Suite:
    """All combinations of heads, head dims, masks and sequence lengths, each of 16384 tokens."""

    seqlens: tuple[int, ...]
    head_dims: tuple[int, ...]
    masks: tuple[str, ...] = MASKS
    heads: tuple[tuple[int, int], ...] = ()  # query and KV heads; none: as many as make heads x head dim 2048

    def shapes(self) -> list[Shape]:
        made = []
        for head_dim, mask, seqlen in product(self.head_dims, self.masks, self.seqlens):
            for q_heads, kv_heads in self.heads or ((2048 // head_dim,) * 2,):
                made.append(Shape(mask, seqlen, max(1, TOKENS // seqlen), q_heads, kv_heads, head_dim))
        return made


@dataclass(frozen=True)
class Cases:
    """Cases that form no grid."""

    cases: tuple[Shape, ...]

    def shapes(self) -> list[Shape]:
        return list(self.cases)


# Lengths as a packed batch of real texts has them: a few long, most short, none a multiple of a tile.
UNEQUAL = (4731, 3111, 2457, 1890, 1333, 1021, 777, 433, 300, 187, 95, 49)
DOCUMENTS = "documents:" + ",".join(map(str, UNEQUAL))
MASK_CASES = (
    Shape("window:4096,0", TOKENS, 1, 16, 16, 128),
    Shape("window:1024,0", TOKENS, 1, 16, 16, 128),
    Shape(DOCUMENTS, TOKENS, 1, 16, 16, 128),
    Shape("prefix:4096", TOKENS, 1, 16, 16, 128),
    Shape("causal", TOKENS, 1, 32, 8, 128, lengths=UNEQUAL),
    Shape("causal", 8192, 2, 8, 8, 256),
    Shape("full", 8192, 2, 8, 8, 256),
    Shape("causal", 8192, 2, 16, 16, 128, softcap=30.0),
    Shape("causal", TOKENS, 1, 64, 8, 64, sinks=True),
    # Boolean matrices, and the full mask that their tiles are compared with.
    *(Shape(mask, length, TOKENS // length, 16, 16, 128) for mask in ("full", "blocks:128") for length in (8192, TOKENS)),
    *(Shape(mask, 8192, 2, 16, 16, 128) for mask in ("elements", "tree")),
)
# What one rank of a real run has: few KV heads, wide heads, queries shorter than keys, small and packed batches.
RANK_CASES = (
    *(Shape("causal", length, 1, 8, 1, 128) for length in (4096, 8192, 16384)),  # Llama 70B on 8 tensor-parallel ranks
    Shape("causal", 8192, 1, 16, 1, 128),  # 405B
    Shape("causal", 32768, 1, 4, 1, 128),
    Shape("causal", 4096, 4, 8, 1, 128),
    Shape("causal", 4096, 2, 64, 8, 128),
    Shape("causal", 2048, 4, 28, 4, 128),
    Shape("causal", 16384, 1, 32, 8, 128),
    Shape("causal", 4096, 1, 71, 1, 128),
    *(Shape(mask, 8192, 2, 16, 16, 192, v_head_dim=128) for mask in MASKS),  # DeepSeek
    *(Shape(mask, 8192, 2, 8, 8, 256) for mask in MASKS),  # Gemma
    Shape("causal", 4096, 4, 8, 4, 256),
    Shape("causal", 8192, 2, 16, 16, 80),
    Shape("causal", 8192, 2, 16, 16, 128, q_seqlen=1024),
    Shape("causal", 16384, 1, 32, 8, 128, q_seqlen=2048),
    Shape("causal", 32768, 1, 32, 8, 128, q_seqlen=4096),
    Shape("full", 8192, 2, 16, 16, 128, q_seqlen=512),
    Shape("causal", 4096, 1, 8, 8, 64),
    Shape("full", 2048, 1, 16, 16, 64),
    Shape("full", TOKENS, 1, 16, 16, 128, lengths=UNEQUAL),
)
# Servers: one query per sequence, many sequences or few, keys in rows or pages; several queries that speculate; a window.
DECODE_CASES = (
    *(Shape("causal", keys, batch, 32, 8, 128, q_seqlen=1, cache="rows") for batch, keys in ((64, 4096), (128, 8192), (16, 8192))),
    *(Shape("causal", keys, batch, 32, 8, 128, q_seqlen=1, cache="rows") for batch, keys in ((1, 8192), (1, 32768), (4, 32768))),
    Shape("causal", 2048, 256, 64, 8, 128, q_seqlen=1, cache="rows"),
    Shape("causal", 32768, 16, 8, 1, 128, q_seqlen=1, cache="rows"),
    Shape("causal", 8192, 64, 32, 8, 64, q_seqlen=1, cache="rows"),
    *(Shape("causal", keys, batch, 32, 8, 128, q_seqlen=1, cache="pages:64") for batch, keys in ((64, 4096), (128, 8192), (1, 32768))),
    Shape("causal", 4096, 64, 32, 8, 128, q_seqlen=1, cache="pages:16"),
    Shape("causal", 4096, 64, 32, 8, 128, q_seqlen=4, cache="pages:64"),
    Shape("window:1024,0", 8192, 128, 32, 8, 128, q_seqlen=1, cache="pages:64"),
)
SUITES: dict[str, Suite | Cases] = {
    "paper": Suite((512, 1024, 2048, 4096, 8192, 16384), (64, 128)),
    "quick": Suite((1024, 4096), (128,)),
    "gqa": Suite((4096, 8192), (128,), heads=((32, 8),)),
    "llama": Suite((4096, 8192, 16384), (128,), ("causal",), ((32, 8), (64, 8), (128, 8))),  # 8B, 70B, 405B
    "masks": Cases(MASK_CASES),
    "ranks": Cases(RANK_CASES),
    "decode": Cases(DECODE_CASES),
}
HOST_SUITE = "host"
FLEX_SUITES = ("paper", "masks")  # FlexAttention compiles for many seconds per shape: not in the short ones
EQUAL_HEADS_SUITES = ("ranks",)
DECODE_SUITES = ("decode",)  # of caches: a forward only, and other candidates


def choose(
    name: str, seqlens: tuple[int, ...] | None = None, head_dims: tuple[int, ...] | None = None, masks: tuple[str, ...] | None = None
) -> list[Shape]:
    """The shapes of a suite. The lists replace those of a grid; of a list of cases they keep the ones that fit."""
    if name not in SUITES:
        raise ValueError(f"unknown suite {name!r}; choose from {', '.join((*SUITES, HOST_SUITE))}")
    suite = SUITES[name]
    if seqlens and min(seqlens) < 1:
        raise ValueError(f"--seqlens must be at least 1; got {', '.join(map(str, seqlens))}")
    if isinstance(suite, Cases):
        return _matching(name, suite, seqlens, head_dims, masks)
    if masks and not set(masks) <= set(MASKS):
        raise ValueError(f"suite {name} takes the masks {' and '.join(MASKS)}; got {', '.join(masks)}")
    if head_dims and not suite.heads and any(dim < 1 or 2048 % dim for dim in head_dims):
        raise ValueError(f"--head-dims must divide 2048; got {', '.join(map(str, head_dims))}")
    changes = {"seqlens": seqlens, "head_dims": head_dims, "masks": masks}
    return replace(suite, **{key: value for key, value in changes.items() if value}).shapes()  # type: ignore[arg-type]


def _matching(
    name: str, suite: Cases, seqlens: tuple[int, ...] | None, head_dims: tuple[int, ...] | None, masks: tuple[str, ...] | None
) -> list[Shape]:
    fits: list[Callable[[Shape], bool]] = [
        lambda shape: not seqlens or shape.seqlen in seqlens,
        lambda shape: not head_dims or shape.head_dim in head_dims,
        lambda shape: not masks or shape.mask.partition(":")[0] in masks,
    ]
    found = [shape for shape in suite.shapes() if all(fit(shape) for fit in fits)]
    if not found:
        known = sorted({shape.mask.partition(":")[0] for shape in suite.shapes()})
        raise ValueError(f"no case of suite {name} has these lengths, head dims and masks; its masks are {', '.join(known)}")
    return found
