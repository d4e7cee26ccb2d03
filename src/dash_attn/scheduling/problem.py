"""A mask and shapes become a Problem: the tiles to visit and the chains they form."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..masks import EMPTY, PARTIAL, Mask, TileMap, check_mask, is_whole, parse_mask
from ..masks.encoding import mask_to_json
from .json_fields import as_mask, as_whole, read_fields

Scalar = TypeVar("Scalar", bound=np.generic)


class Task(NamedTuple):
    """One tile pair of one query head; prints and parses as `h0.q3.kv1` (`b2.h0.q3.kv1` outside the first sequence)."""

    head: int
    q_tile: int
    kv_tile: int
    sequence: int = 0

    def __str__(self) -> str:
        prefix = f"b{self.sequence}." if self.sequence else ""
        return f"{prefix}h{self.head}.q{self.q_tile}.kv{self.kv_tile}"

    @classmethod
    def parse(cls, text: str) -> Task:
        match = re.fullmatch(r"(?:bN\.)?hN\.qN\.kvN".replace("N", r"(0|[1-9][0-9]*)"), text)
        if match is None:
            raise ValueError(f"a task is written like h0.q3.kv1 or b2.h0.q3.kv1; got {text!r}")
        sequence, head, q_tile, kv_tile = (int(g or 0) for g in match.groups())
        return cls(head, q_tile, kv_tile, sequence)


def whole_number(name: str, value: Any, least: int = 1) -> int:
    if not is_whole(value) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}; got {value!r}")
    return int(value)


def _frozen(array: NDArray[Scalar]) -> NDArray[Scalar]:
    array.setflags(write=False)
    return array


ROWS_OF_A_CHAIN = 4096  # of queries, at most, that a chain walks for more than one query head (docs/log.md)


def parts_of(group: int, q_len: int) -> int:
    """Into how many parts a group is split: a part is one query head, or as many short ones as give a chain enough to do. A function
    of the sequence and the group alone, so that batch, number of KV heads and machine change no bits."""
    return -(-group // max(1, ROWS_OF_A_CHAIN // q_len))


@dataclass(frozen=True)
class Problem:
    """The backward pass of `batch` sequences that share lengths, mask and tile sizes.

    `heads` counts KV heads; each serves `group` query heads, which share its chains: all of them, or the members of one of the
    `parts` that a group is dealt to. `head_offset` is the index of the first KV head in the unsharded model, so that a
    tensor-parallel rank keeps its bits.
    """

    mask: Mask
    q_len: int
    kv_len: int
    tile_q: int = 64
    tile_kv: int = 128
    heads: int = 1
    group: int = 1
    batch: int = 1
    head_offset: int = 0
    group_parts: int = 0  # 0: as many as `parts_of` says

    def __post_init__(self) -> None:
        check_mask(self.mask)
        for name in ("q_len", "kv_len", "tile_q", "tile_kv", "heads", "group", "batch", "head_offset", "group_parts"):
            least = 0 if name in ("head_offset", "group_parts") else 1
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        if self.group_parts > self.group:
            raise ValueError(f"a group of {self.group} query heads has at most as many parts; got group_parts={self.group_parts}")
        self.mask.check(self.q_len, self.kv_len)

    @classmethod
    def from_tiles(cls, mask: str | NDArray[np.bool_], q_tiles: int, kv_tiles: int, **rest: Any) -> Problem:
        """A problem given by tile counts alone: equal sequence lengths, mask lengths in KV tiles (or a boolean tile map)."""
        q_tiles, kv_tiles = whole_number("q_tiles", q_tiles), whole_number("kv_tiles", kv_tiles)
        tokens = math.lcm(q_tiles, kv_tiles)
        tokens *= -(-64 // min(tokens // q_tiles, tokens // kv_tiles))  # tiles of at least 64 rows, as on a GPU
        tile_q, tile_kv = tokens // q_tiles, tokens // kv_tiles
        if isinstance(mask, str):
            parse_mask(mask).check(kv_tiles, kv_tiles)  # in KV tiles, so that errors have the lengths that were given
        made = parse_mask(mask, unit=tile_kv) if isinstance(mask, str) else TileMap(mask, tile_q, tile_kv)
        return cls(made, tokens, tokens, tile_q, tile_kv, **rest)

    @property
    def q_tiles(self) -> int:
        return -(-self.q_len // self.tile_q)

    @property
    def kv_tiles(self) -> int:
        return -(-self.kv_len // self.tile_kv)

    @cached_property
    def tile_map(self) -> NDArray[np.uint8]:
        """EMPTY, PARTIAL or FULL for each (q_tile, kv_tile)."""
        return _frozen(self.mask.tile_map(self.q_len, self.kv_len, self.tile_q, self.tile_kv))

    @cached_property
    def kept(self) -> NDArray[np.bool_]:
        return _frozen(self.tile_map != EMPTY)

    @cached_property
    def partial(self) -> NDArray[np.bool_]:
        return _frozen(self.tile_map == PARTIAL)

    @cached_property
    def chain_lengths(self) -> NDArray[np.int64]:
        """Q tiles each chain visits for each of its query heads."""
        return _frozen(self.kept.sum(0))

    @cached_property
    def turns_per_q_tile(self) -> NDArray[np.int64]:
        """Chains that add to each dQ tile of a head."""
        return _frozen(self.kept.sum(1))

    @cached_property
    def parts(self) -> int:
        """Parts of a group: chains per KV tile of a KV head."""
        return self.group_parts or parts_of(self.group, self.q_len)

    @property
    def has_equal_parts(self) -> bool:
        """Whether all parts of a group have as many query heads."""
        return self.group % self.parts == 0

    @property
    def all_parts(self) -> int:
        """Of all KV heads of a sequence. Part p of KV head h is number h * parts + p."""
        return self.heads * self.parts

    def kind_of(self, part: int, kinds: int) -> int:
        """Which kind of head a part is. Kinds take turns, over all parts of the unsharded model."""
        return (part + self.head_offset * self.parts) % kinds

    def members(self, part: int) -> range:
        """The query heads of a part, by its number. Groups are dealt evenly. The last parts may have one more, because theirs are the
        last turns to add dK and dV."""
        head, place = divmod(part, self.parts)
        each, more = divmod(self.group, self.parts)
        shorter = self.parts - more
        first = head * self.group + place * each + max(0, place - shorter)
        return range(first, first + each + (place >= shorter))

    @property
    def most_members(self) -> int:
        """Query heads of the largest part."""
        return -(-self.group // self.parts)

    @property
    def adds(self) -> int:
        """Adds to global memory with which a chain hands on dK and dV, each as large as a contribution to dQ. A group that is not
        split needs none: its chain finishes them."""
        return 2 * -(-self.tile_kv // self.tile_q) if self.parts > 1 else 0

    @property
    def chains(self) -> int:
        return self.batch * self.all_parts * self.kv_tiles

    @property
    def tasks(self) -> int:
        return int(self.chain_lengths.sum()) * self.group * self.heads * self.batch

    def task(self, sequence: int, part: int, kv_tile: int, q_tile: int, member: int = 0) -> Task:
        """The task of the `member`-th query head of a part."""
        return Task(self.members(part).start + member, q_tile, kv_tile, sequence)

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "mask"}
        return {"mask": mask_to_json(self.mask), **fields}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Problem:
        names = tuple(name for name in cls.__dataclass_fields__ if name not in ("mask", "group_parts"))
        read = read_fields(value, "problem", ("mask", *names), ("group_parts",))
        read = {"group_parts": 1, **read}  # older versions wrote none, and had chains of whole groups alone
        numbers = {name: as_whole(read[name], f"problem.{name}") for name in (*names, "group_parts")}
        return cls(as_mask(read["mask"], "mask"), **numbers)
