"""Random calls with a cache of keys and values: in rows or pages, with padding, new keys, rotary embedding, and NaN where nothing is."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from dash_attn import Mask, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from dense import largest_error, same_bits
from fuzzing import drawing
from fuzzing.call import Call, Leaves, Modifiers, OutAndLse, Sequence, end_to_end, in_rows
from fuzzing.drawing import Attended, Numbers, Shape, chance

NAN = float("nan")


@dataclass
class Cache:
    """Where the slots of each sequence are: the first two indices into the cache, slot by slot."""

    keys: Tensor
    values: Tensor
    slots: list[tuple[Tensor, Tensor]]
    places: dict[str, Any]  # arguments

    @classmethod
    def drawn(cls, random: Random, numbers: Numbers, sequences: int, capacity: int, shape: Shape, paged: bool) -> Cache:
        """Nothing is in it: all is NaN."""
        (_, kv_heads), (dim, v_dim), dtype = shape.heads, shape.dims, shape.dtype
        size = random.choice((16, 32, 64)) if paged else capacity
        entries = -(-capacity // size)
        count = entries * sequences + random.randint(0, 3)
        dealt = torch.tensor(random.sample(range(count), entries * sequences), dtype=torch.int32).view(sequences, entries)
        keys, values = (torch.full((count, size, kv_heads, d), NAN, dtype=dtype, device=numbers.device) for d in (dim, v_dim))
        at = torch.arange(entries * size)
        slots = [(row.long()[at // size].to(numbers.device), (at % size).to(numbers.device)) for row in dealt]
        places = {"block_table": dealt} if paged else {"cache_batch_idx": dealt[:, 0].contiguous()}
        return cls(keys, values, slots, {name: x.to(numbers.device) for name, x in places.items()})

    def fill(self, numbers: Numbers, number: int, first: int, end: int) -> None:
        index = self.slots[number][0][first:end], self.slots[number][1][first:end]
        for cache in (self.keys, self.values):
            cache[index] = numbers.draw(end - first, *cache.shape[2:], dtype=cache.dtype)

    def read(self, number: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """(1, keys, heads, dim)."""
        index = self.slots[number][0][first:end], self.slots[number][1][first:end]
        return self.keys[index][None], self.values[index][None]


def cached(random: Random, device: str) -> Call:
    """flash_attn_with_kvcache. Bit by bit, a token has what it has in flash_attn_func of the whole sequence."""
    step = Step(random, device)
    call = Call("flash_attn_with_kvcache", step.words, step.leaves, step.run, step.cut, in_rows, step.attended, Modifiers(step.scores))
    rotary = step.rotary is not None
    call.differentiable, call.comparable, call.rounded, call.check = False, not rotary, rotary, step.check
    call.run_alone = lambda leaves: in_rows(leaves, *whole(call, leaves, step.dropped))
    return call


class Step:
    """One step of some sequences: what is in the cache, what is new, and which options there are."""

    def __init__(self, random: Random, device: str) -> None:
        self.shape, self.numbers = drawing.shape(random, device), Numbers(random, device)
        count, dim = len(self.shape.lengths), self.shape.dims[0]
        self.new = random.choice((0, 1, 1, random.randint(1, 90)))
        rotary = self.new > 0 and dim >= 2 and chance(random, 0.3)
        self.q_len = max(0 if self.new else 1, self.new if rotary or chance(random, 0.8) else random.randint(0, 70))
        self.used = [random.choice((0, random.randint(1, 300))) for _ in range(count)]
        self.padding = [random.randint(0, n) if chance(random, 0.4) else 0 for n in self.used]
        capacity = max(16, max(self.used) + self.new + random.randint(0, 20))
        self.cache = Cache.drawn(random, self.numbers, count, capacity, self.shape, chance(random, 0.5))
        for number, (first, end) in enumerate(zip(self.padding, self.used, strict=True)):
            self.cache.fill(self.numbers, number, first, end)
        self.leaves = self._tensors(random)
        self.given, mask = drawing.simple_mask(random, max(self.q_len, 1), max(self.used) + self.new)
        self.scores = drawing.scores(random, device)
        self.rotary = Rotary(random, self.shape, self.cache.slots[0][0].numel(), device, mask.is_full) if rotary else None
        self.dropped = self._dropped(random, mask)
        keeps = [drawing.by_definition(mask, self.q_len, self.keys_of(number)).keep for number in range(count)]
        self.attended = [Attended(self.given, keep) for keep in keeps]
        self.options = self._options(device)
        self.after: tuple[Tensor, ...] = ()

    def keys_of(self, number: int) -> int:
        return self.used[number] - self.padding[number] + self.new

    def _tensors(self, random: Random) -> Leaves:
        sizes = {name: size for name, size in self.shape.sizes(self.q_len, self.new).items() if name == "q" or self.new}
        found = {name: self.numbers.laid_out(len(self.used), *size, dtype=self.shape.dtype) for name, size in sizes.items()}
        return {**found, "sinks": self.numbers.draw(self.shape.heads[0], dtype=torch.float32)} if chance(random, 0.2) else found

    def _dropped(self, random: Random, mask: Mask) -> int:
        """Keys before the window that the cache has dropped, of every sequence."""
        assert mask.sides is not None
        left, fewest = mask.sides[0], min(map(self.keys_of, range(len(self.used))))
        able = left >= 0 and self.rotary is None and "block_table" not in self.cache.places and fewest >= self.q_len + left
        return random.randint(1, 300) if able and chance(random, 0.6) else 0

    def _options(self, device: str) -> dict[str, Any]:
        lengths = torch.tensor(self.used, dtype=torch.int32, device=device)
        found = {**self.given, **self.scores, **self.cache.places, "cache_seqlens": lengths, "first_position": self.dropped}
        if any(self.padding):
            found["cache_leftpad"] = torch.tensor(self.padding, dtype=torch.int32, device=device)
        return found if self.rotary is None else {**found, **self.rotary.options}

    @property
    def words(self) -> str:
        shape = self.shape._replace(lengths=tuple((self.q_len, n) for n in self.used))
        where = "pages" if "block_table" in self.cache.places else "rows"
        about = f"new={self.new} padding={self.padding} dropped={self.dropped} {self.given} {self.scores} {where}"
        return f"{shape} {about}{' rotary' if self.rotary else ''}"

    def run(self, leaves: Leaves) -> OutAndLse:
        self.after = self.cache.keys.clone(), self.cache.values.clone()
        tensors = leaves["q"], *self.after, leaves.get("k"), leaves.get("v")
        out: tuple[Tensor, Tensor] = flash_attn_with_kvcache(*tensors, **self.options, sinks=leaves.get("sinks"), return_softmax_lse=True)
        return out

    def cut(self, leaves: Leaves) -> list[Sequence]:
        """Keys are those in the cache and the new ones."""
        found = []
        for number, q in enumerate(leaves["q"].split(1)):
            k, v = (x.to(q.dtype) for x in self.cache.read(number, self.padding[number], self.used[number]))
            if self.new:
                k = torch.cat([k, self._new_keys(leaves, number)], 1)
                v = torch.cat([v, leaves["v"][number : number + 1]], 1)
            found.append((q if self.rotary is None else self.rotary.of_queries(q, self._position(number)), k, v))
        return found

    def _position(self, number: int) -> int:
        """Of the first new key: its slot, as FlashAttention has it."""
        return self.used[number]

    def _new_keys(self, leaves: Leaves, number: int) -> Tensor:
        k = leaves["k"][number : number + 1]
        return k if self.rotary is None else self.rotary.of(k, self._position(number))

    def check(self) -> str | None:
        """New keys and values are in their slots, and nothing else has changed."""
        keys, values = self.cache.keys.clone(), self.cache.values.clone()
        for number in range(len(self.used) if self.new else 0):
            index = tuple(x[self.used[number] : self.used[number] + self.new] for x in self.cache.slots[number])
            keys[index], values[index] = self._new_keys(self.leaves, number)[0], self.leaves["v"][number]
        allowed = 32 * torch.finfo(self.shape.dtype).eps + 1e-6
        turned = self.rotary is not None and largest_error(self.after[0].nan_to_num(0), keys.nan_to_num(0)) < allowed
        if not (turned or same_bits(self.after[0], keys)) or not same_bits(self.after[1], values):
            return "the cache holds something else after the call"
        return None


def whole(call: Call, leaves: Leaves, dropped: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Output and LSE of each sequence's last queries, by the forward of the whole sequence. What was dropped is 0."""
    outs, lses = [], []
    for number, (q, k, v) in enumerate(call.cut(leaves)):
        k, v = (torch.cat([x.new_zeros(1, dropped, *x.shape[2:]), x], 1) for x in (k, v))
        before = max(0, k.shape[1] - q.shape[1])
        all_queries = torch.cat([q.new_zeros(1, before, *q.shape[2:]), q], 1)
        options = {**call.attended[number].given, **call.modifiers.scores, "sinks": leaves.get("sinks")}
        out, lse = flash_attn_func(all_queries, k, v, **options, return_lse=True)
        outs.append(out[:, before:])
        lses.append(lse[:, :, before:])
    return outs, lses


class Rotary:
    """Rotary embedding by its definition, and as arguments."""

    def __init__(self, random: Random, shape: Shape, positions: int, device: str, is_full: bool) -> None:
        dim, self.dtype = shape.dims[0], shape.dtype
        half = random.randint(1, dim // 2)
        angles = torch.arange(positions)[:, None] * 100.0 ** -(torch.arange(half) / half)
        self.cos, self.sin, self.is_full = angles.cos().to(device), angles.sin().to(device), is_full
        self.interleaved = chance(random, 0.5)
        self.options = {"rotary_cos": self.cos, "rotary_sin": self.sin, "rotary_interleaved": self.interleaved}

    def of_queries(self, x: Tensor, first: int) -> Tensor:
        """Where every key is attended, all turn as the first new key does."""
        return torch.cat([self.of(one, first) for one in x.split(1, 1)], 1) if self.is_full and x.shape[1] else self.of(x, first)

    def of(self, x: Tensor, first: int) -> Tensor:
        """(1, length, heads, dim): pairs of numbers turn as complex ones, and are rounded."""
        half = self.cos.shape[1]
        cos, sin = (table.double()[first : first + x.shape[1], None] for table in (self.cos, self.sin))
        part = x[..., : 2 * half].double()
        a, b = (part[..., ::2], part[..., 1::2]) if self.interleaved else part.chunk(2, -1)
        found = torch.stack((a * cos - b * sin, a * sin + b * cos), -1)
        found = found if self.interleaved else found.transpose(-1, -2)
        return torch.cat([found.flatten(-2).to(self.dtype).to(x.dtype), x[..., 2 * half :]], -1)


def in_pages(random: Random, device: str) -> Call:
    """flash_attn_varlen_func with a block table: packed queries, keys and values in pages."""
    shape = drawing.shape(random, device, same_lengths=False)
    numbers, heads, dim = Numbers(random, device), shape.heads[0], shape.dims[0]
    q_lengths, kv_lengths = map(list, zip(*shape.lengths, strict=True))
    cache = Cache.drawn(random, numbers, len(q_lengths), max(16, *kv_lengths), shape, True)
    for number, end in enumerate(kv_lengths):
        cache.fill(numbers, number, 0, end)
    leaves = {"q": numbers.laid_out(sum(q_lengths), heads, dim, dtype=shape.dtype)}
    if chance(random, 0.2):
        leaves["sinks"] = numbers.draw(heads, dtype=torch.float32)
    given, mask = drawing.simple_mask(random, 50, 50)
    scores = drawing.scores(random, device)
    offsets = drawing.places(q_lengths, device), drawing.places(kv_lengths, device), max(q_lengths), max(kv_lengths)

    def run(leaves: Leaves) -> OutAndLse:
        rest = {**given, **scores, **cache.places, "sinks": leaves.get("sinks"), "return_lse": True}
        out: tuple[Tensor, Tensor] = flash_attn_varlen_func(leaves["q"], cache.keys, cache.values, *offsets, **rest)
        return out

    def cut(leaves: Leaves) -> list[Sequence]:
        pairs = enumerate(leaves["q"].split(q_lengths))
        return [(q[None], *(x.to(q.dtype) for x in cache.read(number, 0, kv_lengths[number]))) for number, q in pairs]

    attended = [Attended(given, drawing.by_definition(mask, *pair).keep) for pair in shape.lengths]
    words = f"{shape} {given} {scores}"
    call = Call("flash_attn_varlen_func of pages", words, leaves, run, cut, end_to_end, attended, Modifiers(scores), differentiable=False)
    call.run_alone = lambda leaves: end_to_end(leaves, *whole(call, leaves))
    return call
