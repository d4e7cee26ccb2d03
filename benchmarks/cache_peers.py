"""Who attends caches: our kernel, PyTorch's, FlashAttention's, FlashInfer's and vLLM's, where they can be imported.

The keys and values of a shape are caches as servers have them: rows or pages, in copies that no L2 cache holds together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dash_attn import Window, flash_attn_func, flash_attn_with_kvcache
from dash_attn.tools.bench.candidates import CUDNN, OURS, Candidate, Runner, Tensors
from dash_attn.tools.bench.pytorch_peers import FLASH, sdpa
from dash_attn.tools.bench.shape import Shape

from .peers import PACKAGES, first, imported, window_of

L2_BYTES = 200 * 2**20  # several times that of an H200: what is read in turn is read from memory
FORWARD = ("forward",)
FLASHINFER, VLLM = "FlashInfer", "vLLM FlashAttention"
WORKSPACE = 128 * 2**20  # bytes, as FlashInfer's documentation has it


@dataclass(frozen=True)
class Cache:
    """k and v are (batch, keys, heads, dim) or, with a table, (pages, page size, heads, dim)."""

    k: Tensor
    v: Tensor
    lengths: Tensor  # int32, (batch,)
    table: Tensor | None = None  # int32, (batch, pages of a sequence)


def copies_of(shape: Shape, tensors: Tensors) -> int:
    """As many as it takes. On the CPU, where nothing is timed, one."""
    return 1 if tensors.q.device.type == "cpu" else max(1, -(-L2_BYTES // shape.cache_bytes))


def caches(shape: Shape, tensors: Tensors) -> list[Cache]:
    count = copies_of(shape, tensors)
    lengths = torch.full((shape.batch,), shape.seqlen, dtype=torch.int32, device=tensors.k.device)
    if not shape.page_size:
        return [Cache(tensors.k.clone(), tensors.v.clone(), lengths) for _ in range(count)]
    columns = -(-shape.seqlen // shape.page_size)
    order = torch.randperm(shape.batch * columns, generator=torch.Generator().manual_seed(0)).to(tensors.k.device)

    def stored(x: Tensor) -> Tensor:
        filled = pad(x, (0, 0, 0, 0, 0, columns * shape.page_size - shape.seqlen))
        pages = filled.reshape(len(order), shape.page_size, *x.shape[2:])
        return torch.empty_like(pages).index_copy_(0, order, pages)

    return [Cache(stored(tensors.k), stored(tensors.v), lengths, order.view(shape.batch, columns).int()) for _ in range(count)]


def in_turn(attend: Callable[[Cache], Tensor], copies: Iterable[Cache]) -> Runner:
    """A forward that reads the next copy each time. There is no backward."""
    turn = cycle(copies)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(next(turn))

    def backward() -> Any:
        raise NotImplementedError("attention to a cache has no backward")

    return Runner(forward, backward)


def decode_candidates(with_peers: bool = True) -> tuple[list[Candidate], dict[str, str]]:
    """Candidates, and why the others are missing."""
    ours = Candidate(OURS, partial(_with_each_copy, _ours), True, FORWARD, promised=training_forward)
    if not with_peers:
        return [ours], {}
    makers: dict[str, Callable[[], Candidate]] = {name: partial(_flash_attention, name, module) for name, module in PACKAGES.items()}
    found, missing = imported({**makers, FLASHINFER: _flashinfer, VLLM: _vllm})
    backends = {CUDNN: "CUDNN_ATTENTION", FLASH: "FLASH_ATTENTION"}
    pytorch = [Candidate(name, partial(_sdpa, kind), passes=FORWARD, refuses=_refused_by_sdpa) for name, kind in backends.items()]
    return [ours, *pytorch, *found], missing


def training_forward(shape: Shape, tensors: Tensors) -> Tensor:
    """What the output has to be, bit by bit."""
    with torch.no_grad():
        out: Tensor = flash_attn_func(tensors.q, tensors.k, tensors.v, mask=shape.attended)
    return out


def _with_each_copy(attend: Callable[[Shape, Tensors, Cache], Tensor], shape: Shape, tensors: Tensors) -> Runner:
    return in_turn(partial(attend, shape, tensors), caches(shape, tensors))


def _ours(shape: Shape, tensors: Tensors, cache: Cache) -> Any:
    options: dict[str, Any] = {"causal": not shape.attended.is_full, "window_size": window_of(shape)}
    return flash_attn_with_kvcache(tensors.q, cache.k, cache.v, cache_seqlens=cache.lengths, block_table=cache.table, **options)


# ---- PyTorch


def _refused_by_sdpa(shape: Shape) -> str | None:
    if shape.page_size:
        return "scaled_dot_product_attention has no pages"
    if isinstance(shape.attended, Window):
        return "scaled_dot_product_attention has no windows"
    aligned = shape.q_seqlen == 1 or shape.attended.is_full
    return None if aligned else "scaled_dot_product_attention aligns the first query with the first key"


def _sdpa(backend: str, shape: Shape, tensors: Tensors) -> Runner:
    """Heads first, as models that call it keep their caches."""
    attend, q = sdpa(backend, shape), tensors.q.transpose(1, 2)
    turned = (replace(one, k=one.k.transpose(1, 2).contiguous(), v=one.v.transpose(1, 2).contiguous()) for one in caches(shape, tensors))
    return in_turn(lambda cache: attend(q, cache.k, cache.v).transpose(1, 2), turned)


# ---- packages


def _of_copies(name: str, attend: Callable[..., Tensor], refuses: Callable[[Shape], str | None] = Candidate.refuses) -> Candidate:
    return Candidate(name, partial(_with_each_copy, attend), passes=FORWARD, refuses=refuses)


def _flash_attention(name: str, module: str) -> Candidate:
    """Versions up to 3 have a function for caches. The fourth has pages in its functions for rows and for packed tokens."""
    package = import_module(module)
    of_cache = getattr(package, "flash_attn_with_kvcache", None)
    if of_cache is not None:
        return _of_copies(name, partial(_of_cache, of_cache))
    of_rows, of_pages = package.flash_attn_func, package.flash_attn_varlen_func
    has_pages = "page_table" in inspect.signature(of_pages).parameters
    refuses = Candidate.refuses if has_pages else lambda shape: "has no pages" if shape.page_size else None
    return _of_copies(name, partial(_of_version_4, of_rows, of_pages), refuses)


def _of_cache(function: Callable[..., Any], shape: Shape, tensors: Tensors, cache: Cache) -> Tensor:
    known = inspect.signature(function).parameters
    table = "page_table" if "page_table" in known else "block_table"
    options = {"cache_seqlens": cache.lengths, table: cache.table, "window_size": window_of(shape)}
    return first(function(tensors.q, cache.k, cache.v, causal=not shape.attended.is_full, **options))


def _of_version_4(of_rows: Callable[..., Any], of_pages: Callable[..., Any], shape: Shape, tensors: Tensors, cache: Cache) -> Tensor:
    options: dict[str, Any] = {"causal": shape.causal, "window_size": window_of(shape, unlimited=None)}
    if cache.table is None:
        return first(of_rows(tensors.q, cache.k, cache.v, **options))
    longest = {"max_seqlen_q": shape.q_seqlen, "max_seqlen_k": shape.seqlen}
    return first(of_pages(tensors.q, cache.k, cache.v, seqused_k=cache.lengths, page_table=cache.table, **longest, **options))


def _flashinfer() -> Candidate:
    def refuses(shape: Shape) -> str | None:
        if not shape.page_size:
            return "its kernel for decode takes pages"
        return None if shape.q_seqlen == 1 else "its kernel for decode takes one query per sequence"

    wrapper = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
    return Candidate(FLASHINFER, partial(_planned, wrapper), passes=FORWARD, refuses=refuses)


def _planned(wrapper: Callable[..., Any], shape: Shape, tensors: Tensors) -> Runner:
    """Planned once, as a server does for all layers of a step. Pages are the same in every copy."""
    device, made = tensors.q.device, caches(shape, tensors)
    table = made[0].table
    assert table is not None  # else it had refused
    columns = table.shape[1]
    ends = torch.arange(shape.batch + 1, dtype=torch.int32, device=device) * columns
    last = torch.full((shape.batch,), shape.seqlen - (columns - 1) * shape.page_size, dtype=torch.int32, device=device)
    decode = wrapper(torch.zeros(WORKSPACE, dtype=torch.uint8, device=device), "NHD", use_tensor_cores=True)
    sizes = shape.q_heads, shape.kv_heads, shape.head_dim, shape.page_size
    dtype, left = tensors.q.dtype, window_of(shape)[0]
    decode.plan(ends, table.flatten(), last, *sizes, window_left=left, q_data_type=dtype, kv_data_type=dtype)
    return in_turn(lambda cache: decode.run(tensors.q[:, 0], (cache.k, cache.v))[:, None], made)


def _vllm() -> Candidate:
    function = import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
    return _of_copies(VLLM, partial(_of_vllm, function), lambda shape: None if shape.page_size else "its caches have pages")


def _of_vllm(function: Callable[..., Any], shape: Shape, tensors: Tensors, cache: Cache) -> Tensor:
    starts = torch.arange(shape.batch + 1, dtype=torch.int32, device=tensors.q.device) * shape.q_seqlen
    version = {"fa_version": 3} if "fa_version" in inspect.signature(function).parameters else {}
    lengths = {"max_seqlen_q": shape.q_seqlen, "cu_seqlens_q": starts, "max_seqlen_k": shape.seqlen, "seqused_k": cache.lengths}
    options = {"block_table": cache.table, "causal": not shape.attended.is_full, "window_size": list(window_of(shape)), **version}
    out = first(function(tensors.q.flatten(0, 1), cache.k, cache.v, **lengths, **options))
    return out.view(*tensors.q.shape[:3], -1)
