"""Proof, on the GPU at hand, that a row's bits do not depend on how many rows come with it.

What cuBLAS does is promised by nobody, so each kind of product is tried out when it is met for the first time: rows in calls of many
sizes and at other places against the same rows in one large call. Terms cancel in pairs, so that a result is nothing but what rounding
left: there every other order of a sum shows, also after rounding to 16 bits. Verdicts are kept on disk (`record.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.kept import refuse_capture
from ..errors import Unsupported
from .record import Record, record_of
from .rows import BLOCK, OF_NORMS, OF_PRODUCTS, as_rows, at_least, in_blocks
from .switches import precision_of

MOST = 2**14  # rows of a call
SCALE = 8.0  # of inputs: what is left of them is no subnormal number in fp16
MEMORY = 2**32  # bytes that rows and results of a probe take at most
FEWEST = (OF_PRODUCTS, 16, 64, 256)  # rows
TILES = (64, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Compute = Callable[[Tensor], Tensor]


class Way(NamedTuple):
    """How a product is computed: at once, with `fewest` to `most` rows, or, if `block` is not 0, in calls of that many."""

    most: int
    block: int = 0
    fewest: int = OF_PRODUCTS

    def __str__(self) -> str:
        return f"in blocks of {self.block} rows" if self.block else f"at once, as {self.fewest} to {self.most} rows"


class Product(NamedTuple):
    """What cuBLAS chooses a kernel by, beside the number of rows."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # of the weight: (N, K)
    stride: tuple[int, ...]
    has_bias: bool
    precision: str = ""

    def __str__(self) -> str:
        n, k = self.shape
        layouts: dict[tuple[int, ...], str] = {(k, 1): "", (1, n): " transposed"}
        layout = layouts.get(self.stride, f" strides {self.stride}")
        with_bias, precision = " with bias" if self.has_bias else "", self.precision and f", {self.precision}"
        return f"K {k}, N {n}, {str(self.dtype).removeprefix('torch.')}{layout}{with_bias}{precision}"


class Ways:
    """The verdicts of this process, by device."""

    def __init__(self) -> None:
        self._products: dict[Any, Way] = {}
        self._norms: dict[Any, bool] = {}

    def of_product(self, multiply: Multiply, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Way:
        key, asked = _kind(rows, weight, bias)
        way = self._products.get(key)
        if way is None:
            refuse_capture()
            way = self._products[key] = proved(multiply, asked, rows.device, record_of(rows.device))
        return way

    def check_blocks(self, multiply: Multiply, rows: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """On a CPU, where nothing else is tried, and nothing kept on disk."""
        key, asked = _kind(rows, weight, bias)
        if key not in self._products:
            with torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
                self._products[key] = _in_blocks(multiply, asked, *_inputs(asked, 2 * BLOCK, rows.device))

    def of_norm(self, kind: str, norm: Compute, rows: Tensor) -> bool:
        """Whether it is computed in blocks of rows."""
        key = (kind, rows.shape[1], rows.dtype, rows.device)
        if key not in self._norms:
            refuse_capture()
            self._norms[key] = norm_in_blocks(kind, norm, rows.shape[1], rows.dtype, record_of(rows.device), rows.device)
        return self._norms[key]

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]


ways = Ways()


def _kind(rows: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, Product]:
    asked = Product(rows.dtype, tuple(weight.shape), weight.stride(), bias is not None, precision_of(rows.dtype))
    return (asked, rows.device), asked


def proved(multiply: Multiply, asked: Product, device: torch.device, record: Record) -> Way:
    """From the record, or tried now. Raises where not even blocks of one size keep their bits."""
    kept = record.get(str(asked))
    if kept is None:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            way = _tried(multiply, asked, device)
        record.put(str(asked), list(way))
        return way
    return Way(*kept)


def _tried(multiply: Multiply, asked: Product, device: torch.device) -> Way:
    most = _rows_that_fit(asked)
    x, weight, bias = _inputs(asked, most, device)
    whole = multiply(x, weight, bias)
    for fewest in FEWEST:
        if not _differing(partial(_of_at_least, fewest, lambda rows: multiply(rows, weight, bias)), x, whole):
            return Way(most, fewest=fewest)
    return _in_blocks(multiply, asked, x, weight, bias)


def _in_blocks(multiply: Multiply, asked: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Way:
    if _depends_on_place(lambda rows: multiply(rows, weight, bias), x):
        raise Unsupported(
            f"a product of {asked} on {x.device} gives a row other bits at another place, even in blocks of {BLOCK} rows:"
            " dash_attn.invariance cannot be used with it; leave out that layer, or choose another dtype"
        )
    return Way(MOST, BLOCK)


def _depends_on_place(compute: Compute, x: Tensor) -> bool:
    """Of a row in its block."""
    few = x[: 2 * BLOCK]
    return bool(_differ(in_blocks(compute, few)[1:], in_blocks(compute, few[1:])).item())


def _of_at_least(fewest: int, compute: Compute, rows: Tensor) -> Tensor:
    return compute(at_least(fewest, rows))[: len(rows)]


def _differing(compute: Compute, x: Tensor, whole: Tensor) -> bool:
    """Whether some call has other bits than the one of all rows. The host waits once."""
    found = [_differ(compute(as_rows(x[rows])), whole[rows]) for rows in _tries(len(x))]
    return bool(torch.stack(found).any())


def _tries(most: int) -> Iterator[slice]:
    """All small numbers of rows, those around tiles, some others; each at some place."""
    chance = random.Random(0)
    sizes = [
        *range(1, 34),
        *(tile + step for tile in TILES for step in (-1, 0, 1)),
        *(chance.randint(34, most) for _ in range(8)),
        most - 1,
    ]
    for size in sizes:
        for _ in range(1 + 3 * (size <= OF_NORMS)):  # few rows show little at a time
            if size < most:
                start = chance.randint(0, most - size)
                yield slice(start, start + size)


def _differ(some: Tensor, others: Tensor) -> Tensor:
    """By their bits."""
    number = {2: torch.int16, 4: torch.int32, 8: torch.int64}[some.element_size()]
    return (some.contiguous().view(number) != others.contiguous().view(number)).any()


def _rows_that_fit(asked: Product) -> int:
    """Whatever memory is free: verdicts are kept, and must not depend on it."""
    n, k = asked.shape
    rows = MEMORY // ((k + 3 * n) * asked.dtype.itemsize)  # all results, those of a call, and their comparison
    return max(min(rows // 64 * 64, MOST), 2 * FEWEST[-1])


def _inputs(asked: Product, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows and a weight whose products cancel in pairs, at random places."""
    n, k = asked.shape
    chance = torch.Generator(device).manual_seed(k * 2**20 + n)
    places = torch.randperm(k, generator=chance, device=device)
    x = _paired(torch.empty(rows, k, dtype=asked.dtype, device=device), -1.0, places, chance)
    weight = _paired(torch.empty_strided(asked.shape, asked.stride, dtype=asked.dtype, device=device), 1.0, places, chance)
    bias = 1e-4 * torch.randn(n, generator=chance, device=device) if asked.has_bias else None  # so small that it hides nothing
    return x, weight, None if bias is None else bias.to(asked.dtype)


def _paired(out: Tensor, sign: float, places: Tensor, chance: torch.Generator) -> Tensor:
    """Fills it, with little memory beside: the second of each pair is the first times the sign."""
    first, second, odd = places.tensor_split([len(places) // 2, len(places) // 2 * 2])
    half = torch.randn(len(out), len(first), generator=chance, device=out.device, dtype=out.dtype).mul_(SCALE)
    out.index_copy_(1, first, half)
    out.index_copy_(1, second, half.mul_(sign))
    return out.index_fill_(1, odd, 1e-3)


def norm_in_blocks(kind: str, norm: Compute, width: int, dtype: torch.dtype, record: Record, device: torch.device) -> bool:
    """From the record, or tried now; in float32 as well, where rounding hides nothing. False: rows are computed at once, 16 or more.
    Raises where not even blocks of one size keep their bits."""
    name = f"{kind} of {width} columns, {str(dtype).removeprefix('torch.')}"
    if record.get(name) is None:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            inputs = [_rows_of_width(width, each, device) for each in {dtype, torch.float32}]
            at_once = not any(_differing(partial(_of_at_least, OF_NORMS, norm), x, norm(x)) for x in inputs)
            if not at_once and any(_depends_on_place(norm, x) for x in inputs):
                raise Unsupported(
                    f"the {name}, gives a row other bits at another place on {device}, even in blocks of {BLOCK} rows:"
                    " dash_attn.invariance cannot be used with it"
                )
        record.put(name, at_once)
    return not record.get(name)


def _rows_of_width(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    chance = torch.Generator(device).manual_seed(width)
    x = torch.empty(max(min(MOST, 2**24 // width), 4 * OF_NORMS), width, dtype=dtype, device=device)
    return _paired(x, -1.0, torch.randperm(width, generator=chance, device=device), chance)
