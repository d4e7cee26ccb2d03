"""One attention problem of a benchmark, how it is told apart from others, and the suites of such problems, by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, Protocol

import numpy as np

from ...masks import BooleanMask, Documents, IntervalMask, Mask, Prefix, Window, parse_mask
from ...scheduling.json_fields import as_number, as_text, as_whole, as_wholes, read_fields

PASSES = ("forward", "backward")
NUMBERS = ("seqlen", "batch", "q_heads", "kv_heads", "head_dim")  # what every shape names
# Matrix products per pair of a query and a key, as wide as keys and as values: S, O; S, dQ, dK and dP, dV.
PRODUCTS = {"forward": (1, 1), "backward": (3, 2)}


class DrawnMask(Mask):
    """A mask that is drawn for the lengths of a shape, as a boolean matrix."""

    def mask(self, q_len: int, kv_len: int) -> BooleanMask:
        raise NotImplementedError

    def touched(self, q_len: int, kv_len: int) -> int:
        """How many pairs of a query and a key count as computed."""
        raise NotImplementedError


OTHER_MASKS: dict[str, Callable[[str], Mask]] = {}  # by the first word of their text; benchmarks/suites.py has some


@dataclass(frozen=True)
class Shape:
    """`batch` rows of `seqlen` keys. `q_seqlen` queries and a `v_head_dim` are as many and as wide, unless they are given.

    With `lengths`, the one row is that many sequences laid end to end, called with their lengths (flash_attn_varlen_func);
    the mask then holds inside each. `sinks`: one learned logit per query head takes part in every softmax.
    `cache`: keys and values are those of a cache, in "rows" or in pages of so many slots ("pages:64").
    """

    mask: str
    seqlen: int
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    softcap: float = 0.0
    sinks: bool = False
    lengths: tuple[int, ...] = ()
    q_seqlen: int = 0
    v_head_dim: int = 0
    cache: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(self.lengths))
        object.__setattr__(self, "q_seqlen", self.q_seqlen or self.seqlen)
        object.__setattr__(self, "v_head_dim", self.v_head_dim or self.head_dim)
        for name in (*NUMBERS, "q_seqlen", "v_head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.q_heads % self.kv_heads:
            raise ValueError(f"query heads must be a multiple of KV heads; got {self.q_heads} and {self.kv_heads}")
        if self.lengths and (self.batch > 1 or self.mask not in ("causal", "full")):
            raise ValueError(f"lengths go with one row and a causal or full mask; got {self.batch} rows, mask {self.mask!r}")
        if self.sinks and self.batch > 1:
            raise ValueError(f"sinks go with one row: their gradient sums over rows, and the check sees one; got {self.batch} rows")
        if not re.fullmatch(r"(rows|pages:[1-9]\d*)?", self.cache):
            raise ValueError(f"cache must be rows or pages:N, or nothing; got {self.cache!r}")
        if self.cache and (self.lengths or self.softcap or self.sinks):
            raise ValueError(f"a cache goes without lengths, softcap and sinks; got {self.cache!r} with one of them")
        if self.shift < 0 and not self.attended.is_full:
            raise ValueError(f"more queries than keys go with a full mask: others leave queries without a key; got mask {self.mask!r}")
        self.attended.check(self.q_seqlen, self.seqlen)

    def to_json(self) -> dict[str, Any]:
        """What is special is named only where it is there."""
        usual = {"softcap": 0.0, "sinks": False, "lengths": [], "q_seqlen": self.seqlen, "v_head_dim": self.head_dim, "cache": ""}
        found = asdict(self) | {"lengths": list(self.lengths)}
        return {name: value for name, value in found.items() if name not in usual or value != usual[name]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Shape:
        fields = cls.__dataclass_fields__
        read = read_fields(value, "shape", ("mask", *NUMBERS), tuple(fields))
        for name in (*NUMBERS, "q_seqlen", "v_head_dim"):
            as_whole(read.get(name, 1), f"shape.{name}", least=1)
        for name in ("mask", "dtype", "cache"):
            as_text(read.get(name, "as it is"), f"shape.{name}")
        as_number(read.get("softcap", 0.0), "shape.softcap")
        as_wholes(read.get("lengths", []), "shape.lengths")
        return cls(**read)

    @cached_property
    def attended(self) -> Mask:
        """Which query of a row attends to which key. Sequences laid end to end are documents of that row."""
        if self.lengths:
            return Documents(self.lengths, causal=self.mask == "causal")
        return OTHER_MASKS.get(self.mask.partition(":")[0], parse_mask)(self.mask)

    @property
    def argument(self) -> Mask | BooleanMask:
        """What our functions get as the mask of a row. A matrix is drawn and packed here, and kept."""
        return self.attended.mask(self.q_seqlen, self.seqlen) if isinstance(self.attended, DrawnMask) else self.attended

    @property
    def causal(self) -> bool:
        """Nothing but causal."""
        return self.attended.is_causal

    @property
    def plain(self) -> bool:
        """Full, or causal with as many queries as keys, without anything else: what every attention kernel knows."""
        return (self.attended.is_full or (self.causal and not self.shift)) and not self.softcap and not self.sinks

    @property
    def shift(self) -> int:
        """The key that the first query is aligned with: the last query is aligned with the last key."""
        return self.seqlen - self.q_seqlen

    @property
    def sequences(self) -> tuple[int, ...]:
        """Lengths of all sequences that do not see each other, where a kernel for packed sequences could run this."""
        return self.attended.lengths * self.batch if isinstance(self.attended, Documents) else ()

    @property
    def sequences_causal(self) -> bool:
        """Whether such a sequence is causal."""
        return isinstance(self.attended, Documents) and self.attended.causal

    @property
    def page_size(self) -> int:
        """Slots of a page; 0 without pages."""
        return int(self.cache.partition(":")[2] or 0)

    @property
    def cache_bytes(self) -> int:
        """Keys and values that somebody attends, each read once."""
        mask = self.attended
        keys = min(self.seqlen, mask.left + self.q_seqlen) if isinstance(mask, Window) and mask.left >= 0 else self.seqlen
        return self.batch * keys * self.kv_heads * (self.head_dim + self.v_head_dim) * 2

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    def operations(self, direction: str) -> float:
        """Floating-point operations as papers count them: of a causal square half of the full one; of a matrix those of its tiles."""
        by_keys, by_values = PRODUCTS[direction]
        return 2 * self.batch * self.q_heads * self._pairs() * (by_keys * self.head_dim + by_values * self.v_head_dim)

    def tflops(self, direction: str, ms: float) -> float:
        return self.operations(direction) / ms / 1e9

    def _pairs(self) -> float:
        mask = self.attended
        if isinstance(mask, Documents):
            return sum(n**2 for n in mask.lengths) / (2 if mask.causal else 1)
        if mask.is_full:
            return self.q_seqlen * self.seqlen
        if mask.is_causal:
            return self.q_seqlen * self.seqlen - self.q_seqlen**2 / 2
        if isinstance(mask, DrawnMask):
            return mask.touched(self.q_seqlen, self.seqlen)
        assert isinstance(mask, IntervalMask)  # as every mask that can be written
        first, end = mask.clipped_bounds(np.arange(self.q_seqlen), self.q_seqlen, self.seqlen)
        return float((end - first).sum())

    @property
    def kind(self) -> str:
        """Everything but the lengths: what a table or panel has in common."""
        heads = "" if self.group == 1 else f", {self.q_heads} query and {self.kv_heads} KV heads"
        extras = (f", softcap {self.softcap:g}" if self.softcap else "") + (", sinks" if self.sinks else "")
        extras += f", {self.cache.replace(':', ' of ')}" if self.cache else ""
        values = "" if self.v_head_dim == self.head_dim else f" (values {self.v_head_dim})"
        return f"{describe_mask(self)}, head dim {self.head_dim}{values}{heads}{extras}"

    @property
    def length(self) -> str:
        """What a column of a table is called."""
        if self.cache:
            return f"{self.batch} x {self.q_seqlen} on {self.seqlen}"
        return f"{self.q_seqlen} on {self.seqlen}" if self.shift else str(self.seqlen)

    def __str__(self) -> str:
        heads = f", {self.q_heads} heads" if self.group == 1 else ""
        tokens = f"{self.q_seqlen} queries on {self.seqlen} keys" if self.shift else f"{self.seqlen} tokens"
        return f"{self.kind}{heads}, {self.batch} x {tokens}"


def describe_mask(shape: Shape) -> str:
    """A mask in a few words."""
    mask = shape.attended
    if isinstance(mask, Documents):
        what = "sequences (varlen)" if shape.lengths else "documents"
        sizes = f"{min(mask.lengths)} to {max(mask.lengths)} tokens"
        return f"{'causal' if mask.causal else 'full'}, {len(mask.lengths)} {what} of {sizes}"
    if isinstance(mask, Window) and mask.right == 0 and mask.left >= 0:
        return f"causal window of {mask.left}"
    return f"prefix of {mask.length}" if isinstance(mask, Prefix) else str(mask)


TOKENS = 16384  # batch x seqlen
MASKS = ("causal", "full")
HOST_SUITE = "host"
Numbers = tuple[int, ...] | None


class Shapes(Protocol):
    def shapes(self) -> list[Shape]: ...

    def chosen(self, name: str, seqlens: Numbers, head_dims: Numbers, masks: tuple[str, ...] | None) -> list[Shape]:
        """Those that fit these lists. `name` is for errors."""


@dataclass(frozen=True)
class Suite:
    """All combinations of heads, head dims, masks and sequence lengths, each of 16384 tokens."""

    seqlens: tuple[int, ...]
    head_dims: tuple[int, ...]
    masks: tuple[str, ...] = MASKS
    heads: tuple[tuple[int, int], ...] = ()  # query and KV heads; none: as many as make heads x head dim 2048

    def shapes(self) -> list[Shape]:
        return [
            Shape(mask, seqlen, max(1, TOKENS // seqlen), *heads, head_dim)
            for head_dim, mask, seqlen in product(self.head_dims, self.masks, self.seqlens)
            for heads in self.heads or ((2048 // head_dim,) * 2,)
        ]

    def chosen(self, name: str, seqlens: Numbers, head_dims: Numbers, masks: tuple[str, ...] | None) -> list[Shape]:
        """The lists replace those of the grid."""
        if masks and not set(masks) <= set(MASKS):
            raise ValueError(f"suite {name} takes the masks {' and '.join(MASKS)}; got {', '.join(masks)}")
        if head_dims and not self.heads and any(dim < 1 or 2048 % dim for dim in head_dims):
            raise ValueError(f"--head-dims must divide 2048; got {', '.join(map(str, head_dims))}")
        changes: dict[str, Any] = {"seqlens": seqlens, "head_dims": head_dims, "masks": masks}
        return replace(self, **{key: value for key, value in changes.items() if value}).shapes()


SUITES: dict[str, Shapes] = {"quick": Suite((1024, 4096), (128,)), "gqa": Suite((4096, 8192), (128,), heads=((32, 8),))}


def choose(
    suites: Mapping[str, Shapes], name: str, seqlens: Numbers = None, head_dims: Numbers = None, masks: tuple[str, ...] | None = None
) -> list[Shape]:
    """The shapes of a suite; none of the host's, which has its own."""
    if name == HOST_SUITE:
        return []
    if name not in suites:
        raise ValueError(f"unknown suite {name!r}; choose from {', '.join((*suites, HOST_SUITE))}")
    if seqlens and min(seqlens) < 1:
        raise ValueError(f"--seqlens must be at least 1; got {', '.join(map(str, seqlens))}")
    return suites[name].chosen(name, seqlens, head_dims, masks)
