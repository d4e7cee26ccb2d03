"""The shapes a benchmark times."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

TOKENS = 16384  # batch x seqlen
MASKS = ("causal", "full")
PASSES = ("forward", "backward")
MULTIPLICATIONS = {"forward": 2, "backward": 5}  # matrix products of S x S x D, each of 2 S^2 D operations


@dataclass(frozen=True)
class Shape:
    """One attention problem: `batch` sequences of `seqlen` tokens, as many keys as queries."""

    mask: str
    seqlen: int
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.mask not in MASKS:
            raise ValueError(f"a benchmark takes the masks {' and '.join(MASKS)}; got {self.mask!r}")
        for name in ("seqlen", "batch", "q_heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.q_heads % self.kv_heads:
            raise ValueError(f"query heads must be a multiple of KV heads; got {self.q_heads} and {self.kv_heads}")

    @property
    def causal(self) -> bool:
        return self.mask == "causal"

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    def operations(self, direction: str) -> float:
        """Floating-point operations as papers count them: of a causal mask half of the full one."""
        full = 2 * MULTIPLICATIONS[direction] * self.batch * self.q_heads * self.seqlen**2 * self.head_dim
        return full / 2 if self.causal else float(full)

    def __str__(self) -> str:
        heads = f"{self.q_heads} heads" if self.group == 1 else f"{self.q_heads}/{self.kv_heads} heads"
        return f"{self.mask}, head dim {self.head_dim}, {self.batch} x {self.seqlen} tokens, {heads}"


@dataclass(frozen=True)
class Suite:
    """All combinations of masks, head dims and sequence lengths, each of 16384 tokens."""

    seqlens: tuple[int, ...]
    head_dims: tuple[int, ...]
    masks: tuple[str, ...] = MASKS
    heads: tuple[int, int] | None = None  # query and KV heads; None: as many as make heads x head dim 2048

    def shapes(self) -> list[Shape]:
        made = []
        for head_dim, mask, seqlen in product(self.head_dims, self.masks, self.seqlens):
            q_heads, kv_heads = self.heads or (2048 // head_dim,) * 2
            made.append(Shape(mask, seqlen, max(1, TOKENS // seqlen), q_heads, kv_heads, head_dim))
        return made


SUITES = {
    "paper": Suite((512, 1024, 2048, 4096, 8192, 16384), (64, 128)),
    "quick": Suite((1024, 4096), (128,)),
    "gqa": Suite((4096, 8192), (128,), heads=(32, 8)),
}
HOST_SUITE = "host"


def choose(
    name: str, seqlens: tuple[int, ...] | None = None, head_dims: tuple[int, ...] | None = None, masks: tuple[str, ...] | None = None
) -> list[Shape]:
    """The shapes of a suite, with some of its lists replaced."""
    if name not in SUITES:
        raise ValueError(f"unknown suite {name!r}; choose from {', '.join((*SUITES, HOST_SUITE))}")
    suite = SUITES[name]
    if seqlens and min(seqlens) < 1:
        raise ValueError(f"--seqlens must be at least 1; got {', '.join(map(str, seqlens))}")
    if head_dims and suite.heads is None and any(dim < 1 or 2048 % dim for dim in head_dims):
        raise ValueError(f"--head-dims must divide 2048; got {', '.join(map(str, head_dims))}")
    changes = {"seqlens": seqlens, "head_dims": head_dims, "masks": masks}
    return replace(suite, **{key: value for key, value in changes.items() if value}).shapes()  # type: ignore[arg-type]
