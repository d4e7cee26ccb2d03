"""What random calls are made of: lengths, heads, numbers in all layouts, masks and choices. The same for the same `Random`."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from boolean_masks import SORTS
from dash_attn import BooleanMask, Causal, Documents, Full, Mask, Prefix, TileMap, Window
from dash_attn.scheduling import GENERATORS, Problem, generate
from dense import element_mask

EDGES = (63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 320, 385)  # of tiles
HEADS = ((1, 1), (2, 2), (2, 1), (3, 1), (4, 2), (3, 3), (5, 1), (6, 2))
DTYPES = {
    "cpu": (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.bfloat16, torch.float16),
}
LONG = 130  # tokens: with more, there are few heads and sequences


class Shape(NamedTuple):
    """Of q, k and v. lengths: (queries, keys) of each sequence."""

    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: torch.dtype

    def sizes(self, queries: int, keys: int) -> dict[str, tuple[int, int, int]]:
        """Of so many rows of q, k and v."""
        (heads, kv_heads), (dim, v_dim) = self.heads, self.dims
        return {"q": (queries, heads, dim), "k": (keys, kv_heads, dim), "v": (keys, kv_heads, v_dim)}

    def __str__(self) -> str:
        lengths = ",".join(f"{q}x{k}" for q, k in self.lengths)
        return f"{lengths} heads {self.heads[0]}/{self.heads[1]} dims {self.dims[0]}/{self.dims[1]} {str(self.dtype)[6:]}"


class Attended(NamedTuple):
    """A mask as arguments of a call, and by the definition: (1 or query heads, queries, keys)."""

    given: dict[str, Any]
    keep: Tensor

    def on(self, device: torch.device) -> Attended:
        given = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.given.items()}
        return Attended(given, self.keep.to(device))


def chance(random: Random, share: float) -> bool:
    return random.random() < share


def length(random: Random) -> int:
    sort = random.random()
    if sort < 0.06:
        return random.choice((0, 1))
    if sort < 0.50:
        return random.randint(2, 24)
    if sort < 0.62:
        return random.choice(EDGES)
    return random.randint(258, 420) if sort > 0.975 else random.randint(2, 110)


def head_dim(random: Random, device: str) -> int:
    if device == "cuda":
        return random.choice((64, 64, 128, 128, 96, 192, 256, 8, 40, 59, 111))
    return random.choice((8, 16, 16, 32, 64, random.randint(1, 48), random.randint(1, 100)))


def shape(random: Random, device: str, same_lengths: bool = True, square: bool = False) -> Shape:
    """same_lengths: of all sequences, as in a batch. square: as many queries as keys."""
    pair = length(random), length(random)
    if square or chance(random, 0.5):
        pair = pair[0], pair[0]
    is_long = max(pair) > LONG
    count = random.choice((1, 1, 1, 2) if is_long else (1, 1, 2, 2, 3))
    heads = random.choice(HEADS[:4] if is_long else HEADS[:3] * 3 + HEADS)
    if same_lengths:
        lengths = [pair] * count
    else:
        lengths = [pair, *((length(random), length(random)) for _ in range(count - 1))]
        lengths = [(q, q) for q, _ in lengths] if square or chance(random, 0.6) else lengths
    dim = head_dim(random, device)
    v_dim = head_dim(random, device) if chance(random, 0.2) else dim
    return Shape(tuple(lengths), heads, (dim, v_dim), random.choice(DTYPES[device]))


class Numbers:
    """Standard normal numbers on a device."""

    def __init__(self, random: Random, device: str) -> None:
        self.random, self.device = random, device
        self.source = torch.Generator().manual_seed(random.getrandbits(62))

    def draw(self, *sizes: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return (torch.randn(sizes, generator=self.source, dtype=torch.float64) * scale).to(dtype).to(self.device)

    def laid_out(self, *sizes: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """(.., length, heads, dim) in one of the layouts that callers have."""
        x = self.draw(*sizes, dtype=dtype, scale=scale)
        sort = self.random.choice(("plain", "plain", "heads first", "part", "every second", "every second dim", "expanded"))
        if sort == "heads first":
            return x.transpose(-2, -3).contiguous().transpose(-2, -3)
        if sort == "part":
            before, behind = self.random.randint(0, 3), self.random.randint(0, 3)
            return torch.nn.functional.pad(x, (before, behind), value=7.0)[..., before : before + sizes[-1]]
        if sort == "every second":
            return x.repeat_interleave(2, -3)[..., ::2, :, :]
        if sort == "every second dim":
            return x.repeat_interleave(2, -1)[..., ::2]
        if sort == "expanded" and x.numel():
            dim = self.random.choice([-2, 0] if x.ndim == 4 else [-2])
            return x.narrow(dim, 0, 1).expand(sizes)
        return x


def window(random: Random, q_len: int, kv_len: int) -> tuple[int, int]:
    most = max(q_len, kv_len, 1)
    sides = [random.choice((-1, 0, 1, random.randint(0, most), random.randint(0, 2 * most))) for _ in range(2)]
    return sides[0], sides[1]


def documents(random: Random, total: int) -> Documents:
    cuts = sorted({random.randint(1, total) for _ in range(random.randint(0, 4))} | {total})
    return Documents(tuple(np.diff([0, *cuts]).tolist()), chance(random, 0.6))


def tile_map(random: Random, q_len: int, kv_len: int) -> TileMap:
    block_q, block_kv = random.choice(((64, 128), (64, 64), (16, 16), (random.randint(1, 90), random.randint(1, 90))))
    kept = np.random.default_rng(random.getrandbits(32)).random((-(-q_len // block_q), -(-kv_len // block_kv)))
    return TileMap(kept < random.choice((0.3, 0.6, 1.0)), block_q, block_kv)


def named_mask(random: Random, q_len: int, kv_len: int) -> Mask:
    sorts = ["full", "causal", "window", "window", "prefix"]
    if q_len and kv_len:
        sorts.append("tiles")
    if q_len == kv_len > 0:
        sorts.append("documents")
    sort = random.choice(sorts)
    if sort == "documents":
        return documents(random, q_len)
    if sort == "tiles":
        return tile_map(random, q_len, kv_len)
    masks = {"full": Full(), "causal": Causal(), "prefix": Prefix(random.randint(0, kv_len))}
    return masks[sort] if sort in masks else Window(*window(random, q_len, kv_len))


def by_definition(mask: Mask, q_len: int, kv_len: int) -> Attended:
    return Attended({"mask": mask}, element_mask(mask, q_len, kv_len)[None])


def simple_mask(random: Random, q_len: int, kv_len: int) -> tuple[dict[str, Any], Mask]:
    """In FlashAttention's arguments, and as a mask."""
    sort = random.choice(("full", "causal", "window", "causal window"))
    if sort == "full":
        return {}, Full()
    if sort == "causal":
        return {"causal": True}, Causal()
    left, right = window(random, q_len, kv_len)
    if sort == "causal window":
        return {"causal": True, "window_size": (left, right)}, Causal() if left < 0 else Window(left, 0)
    mask = Full() if (left, right) == (-1, -1) else Causal() if (left, right) == (-1, 0) else Window(left, right)
    return {"window_size": (left, right)}, mask


def matrix(random: Random, *sizes: int) -> Tensor:
    """A boolean mask (.., queries, keys) in which rows, columns and whole tiles may be empty."""
    source = torch.Generator().manual_seed(random.getrandbits(62))
    found = torch.zeros(sizes, dtype=torch.bool)
    if 0 in sizes:
        return found
    for one in found.view(-1, *sizes[-2:]):
        sort = random.choice(SORTS[:1] + SORTS) if min(sizes[-2:]) < 100 else SORTS[0]
        drawn = sort((sizes[-2], sizes[-1]), source)
        one[: drawn.shape[0], : drawn.shape[1]] = drawn[: sizes[-2], : sizes[-1]]
        if chance(random, 0.3):
            first = random.randrange(sizes[-2])
            one[first : first + random.choice((1, 70))] = False
    return found


def matrix_mask(random: Random, sequences: int, heads: int, q_len: int, kv_len: int) -> list[Attended]:
    """A tensor of booleans, of 0 and -inf, or a BooleanMask, that broadcasts: what the call is given, and what each sequence has."""
    leading: tuple[int, ...] = random.choice(((), (1, 1), (sequences, 1), (1, heads), (sequences, heads), (heads,)))
    found = matrix(random, *leading, q_len, kv_len)
    everything = found.expand(sequences, heads, q_len, kv_len) if len(leading) != 1 else found[None].expand(sequences, -1, -1, -1)
    sort = random.choice(("tensor", "tensor", "numbers", "made"))
    given: Any = found
    if sort == "numbers":
        given = torch.zeros(found.shape).masked_fill_(~found, -torch.inf)
    elif sort == "made" and found.numel():
        given = BooleanMask(found)
    return [Attended({"mask": given}, everything[number]) for number in range(sequences)]


def alone(given: dict[str, Any], keep: Tensor) -> dict[str, Any]:
    """The mask of one sequence. Matrices are those of this sequence."""
    is_matrix = isinstance(given.get("mask"), (Tensor, BooleanMask))
    return {**given, "mask": keep[None]} if is_matrix else given


def schedule(random: Random, device: str, mask: Mask | None, shape: Shape, head_offset: int) -> Any:
    """Mostly "auto", else a name, or on the CPU an object or its JSON text."""
    if chance(random, 0.7):
        return "auto"
    name = random.choice(tuple(GENERATORS))
    (q_len, kv_len), (heads, kv_heads) = shape.lengths[0], shape.heads
    if device == "cuda" or mask is None or isinstance(mask, Documents) or not q_len or not kv_len or chance(random, 0.7):
        return name
    problem = Problem(mask, q_len, kv_len, 64, 128, kv_heads, heads // kv_heads, len(shape.lengths), head_offset)
    made = generate(random.choice(("auto", "alternating", "weave")), problem, 132)
    return made if chance(random, 0.5) else made.to_json()


def scores(random: Random, device: str) -> dict[str, Any]:
    """Choices that change scores."""
    found: dict[str, Any] = {}
    if chance(random, 0.25):
        found["softmax_scale"] = random.choice((0.05, 0.3, 1.0, 0.125, *([-0.3] if device == "cpu" else [])))
    if chance(random, 0.2):
        found["softcap"] = random.choice((1.0, 5.0, 30.0))
    return found


def seeds(random: Random, count: int, device: str) -> Tensor:
    return torch.tensor([random.choice((0, random.getrandbits(62), -random.getrandbits(40))) for _ in range(count)], device=device)


def places(lengths: Sequence[int], device: str) -> Tensor:
    """Where packed sequences begin and end."""
    return torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device)
