"""What ranks do in the tests of calls that they compare: each call, in whatever order. All in one run, with a short time limit."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from dash_attn.distributed import context_parallel_attention, shard, unshard
from dash_attn.distributed.context import layout, of_rank
from dash_attn.distributed.hosts import Hosts
from dash_attn.distributed.peers import _hosts
from processes import said

RANKS, ODD = 3, 1
ROWS = 256 * RANKS
LIMIT = 4  # seconds that a rank waits for a silent one
HEADS, DIM = 3, 8

Kind = dict[str, Any]
KNOWN: dict[str, tuple[Kind, Kind]] = {  # by the fact that an error names: two kinds that all ranks have called before
    "softcap": ({}, {"softcap": 5.0}),
    "mask": ({}, {"window_size": (300, 0)}),
    "sharding": ({}, {"rows": 2 * ROWS}),
    "cu_seqlens": ({"cu_seqlens": (0, 300, ROWS)}, {"cu_seqlens": (0, 301, ROWS)}),
    "ulysses": ({}, {"ulysses": RANKS}),
    "the batch size": ({"cu_seqlens": (0, ROWS)}, {"cu_seqlens": (0, ROWS), "batch": 2}),
}
BACKWARDS: dict[str, Kind] = {
    "one sequence": {},
    "ulysses": {"ulysses": RANKS},
    "documents": {"cu_seqlens": (0, 300, ROWS)},
    "traced": {"traced": True},
}


def everything(rank: int) -> dict[str, Any]:
    with _as_on_a_gpu():
        known = {fact: _known(rank, kinds) for fact, kinds in KNOWN.items()}
        sizes = _unshard_another_size(rank)
    return {
        "known": known,
        "unshard": sizes,
        "swapped": {name: said(lambda kind=kind: _swapped(rank, kind)) for name, kind in BACKWARDS.items()},  # type: ignore[misc]
        "forward in a backward": said(lambda: _forward_in_a_backward(rank)),
        "a group for GPUs": _of_gpus_only(rank),
        "groups that are kept": _groups_that_are_kept(),
        "right afterwards": _swapped(rank=0, kind={}),
        "failed": _fails_and_goes_on(rank),
        "silent": _silent(rank),
    }


class _Gpu:
    type = "cuda"


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Were ranks to compare calls by a rule for each device again, they would be told that this is a GPU, and send numbers by the CPU."""

    def told(function: Callable[..., Any], before: type, after: Any) -> Callable[..., Any]:
        return lambda *given: function(*(after if isinstance(one, before) else one for one in given))

    with ExitStack() as patches:
        for module in (of_rank, layout):
            patches.enter_context(patch.object(module, "agree", told(module.agree, torch.device, _Gpu())))
        numbers = told(Hosts.gather, _Gpu, torch.device("cpu"))
        patches.enter_context(patch.object(Hosts, "gather", numbers))
        yield


def _attend(number: int = 1, rows: int = ROWS, batch: int = 1, traced: bool = False, **given: Any) -> tuple[Tensor, Tensor]:
    """The output, and the keys."""
    source = torch.Generator().manual_seed(number)
    q, k, v = (shard(torch.randn(batch, rows, HEADS, DIM, generator=source)).requires_grad_() for _ in range(3))
    function = torch.compile(context_parallel_attention, backend="eager") if traced else context_parallel_attention
    return function(q, k, v, causal=True, **given), k  # type: ignore[operator]


def _known(rank: int, kinds: tuple[Kind, Kind]) -> str:
    for kind in kinds:
        _attend(**kind)[0].sum().backward()  # type: ignore[no-untyped-call]
    return said(lambda: _attend(**kinds[rank == ODD]))


def _unshard_another_size(rank: int) -> str:
    for width in (1, 2):
        unshard(torch.ones(1, 6, width))
    return said(lambda: unshard(torch.ones(1, 6, 1 + (rank == ODD))))


def _swapped(rank: int, kind: Kind) -> list[Tensor]:
    """The gradients of the keys of two calls, whose backwards the odd rank runs in another order."""
    (one, k), (other, j) = _attend(1, **kind), _attend(2, **kind)
    for out in (other, one) if rank == ODD else (one, other):
        out.square().sum().backward()
    return [unshard(x.grad) for x in (k, j) if x.grad is not None]


def _forward_in_a_backward(rank: int) -> None:
    out, _ = _attend()
    if rank == ODD:
        _attend()
    else:
        out.sum().backward()  # type: ignore[no-untyped-call]


def _of_gpus_only(rank: int) -> str:
    """As NCCL is: the group itself cannot send what is in the host's memory."""
    group = dist.new_group(list(range(RANKS)), backend="cuda:gloo")
    return said(lambda: _attend(group=group, softcap=5.0 * (rank == ODD)))


def _groups_that_are_kept() -> int:
    """Of those that were made and destroyed."""
    before = len(_hosts)
    for _ in range(3):
        group = dist.new_group(list(range(RANKS)))
        unshard(torch.ones(1, 6), group)
        dist.barrier()
        dist.destroy_process_group(group)
        del group
    gc.collect()
    return len(_hosts) - before


def _fails_and_goes_on(rank: int) -> str:
    """The odd rank's memory does not suffice; it goes on with its next batch."""
    group = dist.new_group(list(range(RANKS)), timeout=timedelta(seconds=LIMIT / 2))
    unshard(torch.ones(1, 6), group)
    if rank == ODD:
        with patch.object(layout, "gather_rows", side_effect=MemoryError("planted")), suppress(MemoryError):
            unshard(torch.ones(1, 6), group)
    return said(lambda: unshard(torch.ones(1, 6), group))


def _silent(rank: int) -> dict[str, Any]:
    """After a call that went well, the odd rank is late."""
    group = dist.new_group(list(range(RANKS)), timeout=timedelta(seconds=LIMIT))
    unshard(torch.ones(1, 6), group)
    start = time.monotonic()
    if rank == ODD:
        time.sleep(1.5 * LIMIT)
    return {"words": said(lambda: unshard(torch.ones(1, 6), group)), "seconds": time.monotonic() - start}
