"""One attention problem of a benchmark, and how it is told apart from others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...masks import Documents, IntervalMask, Mask, Prefix, Window, parse_mask
from ...scheduling.json_fields import as_number, as_text, as_whole, as_wholes, read_fields

PASSES = ("forward", "backward")
MULTIPLICATIONS = {"forward": 2, "backward": 5}  # matrix products of S x S x D, each of 2 S^2 D operations


@dataclass(frozen=True)
class Shape:
    """`batch` rows of `seqlen` tokens, as many keys as queries.

    With `lengths`, the one row is that many sequences laid end to end, called with their lengths (flash_attn_varlen_func);
    the mask then holds inside each. `sinks`: one learned logit per query head takes part in every softmax.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(self.lengths))
        for name in ("seqlen", "batch", "q_heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.q_heads % self.kv_heads:
            raise ValueError(f"query heads must be a multiple of KV heads; got {self.q_heads} and {self.kv_heads}")
        if self.lengths and (self.batch > 1 or self.mask not in ("causal", "full")):
            raise ValueError(f"lengths go with one row and a causal or full mask; got {self.batch} rows, mask {self.mask!r}")
        if self.sinks and self.batch > 1:
            raise ValueError(f"sinks go with one row: their gradient sums over rows, and the check sees one; got {self.batch} rows")
        self.attended.check(self.seqlen, self.seqlen)

    def to_json(self) -> dict[str, Any]:
        """What is special is named only where it is there."""
        special = {"softcap": self.softcap, "sinks": self.sinks, "lengths": list(self.lengths)}
        common = {name: value for name, value in asdict(self).items() if name not in special}
        return common | {name: value for name, value in special.items() if value}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Shape:
        fields = cls.__dataclass_fields__
        numbers = ("seqlen", "batch", "q_heads", "kv_heads", "head_dim")
        read = read_fields(value, "shape", ("mask", *numbers), tuple(fields))
        for name in numbers:
            as_whole(read[name], f"shape.{name}", least=1)
        for name in ("mask", "dtype"):
            as_text(read.get(name, "as it is"), f"shape.{name}")
        as_number(read.get("softcap", 0.0), "shape.softcap")
        as_wholes(read.get("lengths", []), "shape.lengths")
        return cls(**read)

    @cached_property
    def attended(self) -> Mask:
        """Which query of a row attends which key. Sequences laid end to end are documents of that row."""
        return Documents(self.lengths, causal=self.mask == "causal") if self.lengths else parse_mask(self.mask)

    @property
    def causal(self) -> bool:
        """Nothing but causal."""
        return self.attended.is_causal

    @property
    def plain(self) -> bool:
        """Full or causal, without anything else: what every attention kernel knows."""
        return (self.attended.is_full or self.causal) and not self.softcap and not self.sinks

    @property
    def sequences(self) -> tuple[int, ...]:
        """Lengths of all sequences that do not see each other, where a kernel for packed sequences could run this."""
        return self.attended.lengths * self.batch if isinstance(self.attended, Documents) else ()

    @property
    def sequences_causal(self) -> bool:
        """Whether such a sequence is causal."""
        return isinstance(self.attended, Documents) and self.attended.causal

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    def operations(self, direction: str) -> float:
        """Floating-point operations as papers count them: of a causal square half of the full one."""
        return 2 * MULTIPLICATIONS[direction] * self.batch * self.q_heads * self._pairs() * self.head_dim

    def _pairs(self) -> float:
        mask = self.attended
        if isinstance(mask, Documents):
            return sum(n**2 for n in mask.lengths) / (2 if mask.causal else 1)
        if mask.is_full or mask.is_causal:
            return self.seqlen**2 / (2 if mask.is_causal else 1)
        assert isinstance(mask, IntervalMask)  # as every mask that can be written
        first, end = mask.clipped_bounds(np.arange(self.seqlen), self.seqlen, self.seqlen)
        return float((end - first).sum())

    @property
    def kind(self) -> str:
        """Everything but the lengths: what a table or panel has in common."""
        heads = "" if self.group == 1 else f", {self.q_heads} query and {self.kv_heads} KV heads"
        extras = (f", softcap {self.softcap:g}" if self.softcap else "") + (", sinks" if self.sinks else "")
        return f"{describe_mask(self)}, head dim {self.head_dim}{heads}{extras}"

    def __str__(self) -> str:
        heads = f", {self.q_heads} heads" if self.group == 1 else ""
        return f"{self.kind}{heads}, {self.batch} x {self.seqlen} tokens"


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
