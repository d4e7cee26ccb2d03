"""The suites beside those of `dash-attn bench`: the shapes of papers, of models, of ranks, of masks, of servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dash_attn.tools.bench.shape import MASKS, TOKENS, Numbers, Shape, Shapes, Suite
from dash_attn.tools.bench.shape import SUITES as SHORT
from dash_attn.tools.bench.shape import choose as chosen

from . import matrices  # noqa: F401 (whose masks shapes name)


@dataclass(frozen=True)
class Cases:
    """Cases that form no grid."""

    cases: tuple[Shape, ...]

    def shapes(self) -> list[Shape]:
        return list(self.cases)

    def chosen(self, name: str, seqlens: Numbers, head_dims: Numbers, masks: tuple[str, ...] | None) -> list[Shape]:
        """The lists keep the cases that fit."""
        fits: list[Callable[[Shape], bool]] = [
            lambda shape: not seqlens or shape.seqlen in seqlens,
            lambda shape: not head_dims or shape.head_dim in head_dims,
            lambda shape: not masks or shape.mask.partition(":")[0] in masks,
        ]
        found = [shape for shape in self.cases if all(fit(shape) for fit in fits)]
        if not found:
            known = sorted({shape.mask.partition(":")[0] for shape in self.cases})
            raise ValueError(f"no case of suite {name} has these lengths, head dims and masks; its masks are {', '.join(known)}")
        return found


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
SUITES: dict[str, Shapes] = {
    "paper": Suite((512, 1024, 2048, 4096, 8192, 16384), (64, 128)),
    **SHORT,
    "llama": Suite((4096, 8192, 16384), (128,), ("causal",), ((32, 8), (64, 8), (128, 8))),  # 8B, 70B, 405B
    "masks": Cases(MASK_CASES),
    "ranks": Cases(RANK_CASES),
    "decode": Cases(DECODE_CASES),
}
FLEX_SUITES = ("paper", "masks")  # FlexAttention compiles for many seconds per shape: not in the short ones
EQUAL_HEADS_SUITES = ("ranks",)
DECODE_SUITES = ("decode",)  # of caches: a forward only, and other candidates


def choose(name: str, seqlens: Numbers = None, head_dims: Numbers = None, masks: tuple[str, ...] | None = None) -> list[Shape]:
    return chosen(SUITES, name, seqlens, head_dims, masks)
