"""Ranks on a GPU compare every call: kinds that both know, backwards in another order, values. No host waits for the GPU meanwhile."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn import flash_attn_func
from dash_attn.distributed import context_parallel_attention, shard, unshard
from dash_attn.distributed.hosts import ATTENTION
from dash_attn.distributed.peers import Peers
from processes import run_processes, said

pytestmark = pytest.mark.gpu
RANKS, ROWS, HEADS, DIM = 2, 1024, 2, 64
ASLEEP = 3_000_000_000  # cycles: more than a second
KNOWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # by the fact that an error names
    "softcap": ({}, {"softcap": 5.0}),
    "sharding": ({}, {"rows": 2 * ROWS}),
    "mask": ({}, {"window_size": (300, 0)}),
    "cu_seqlens": ({"cu_seqlens": (0, 300, ROWS)}, {"cu_seqlens": (0, 301, ROWS)}),
}
VALUES: dict[str, dict[str, Any]] = {
    "the sinks": {"sinks": torch.zeros(HEADS)},
    "dropout_seed": {"dropout_p": 0.1, "dropout_seed": torch.tensor([7]), "ulysses": RANKS},
    "alibi_slopes": {"alibi_slopes": torch.ones(HEADS), "ulysses": RANKS},
}


def worker(rank: int) -> dict[str, Any]:
    return {
        "known": {fact: known(rank, kinds) for fact, kinds in KNOWN.items()},
        "unshard": unshard_another_size(rank),
        "swapped": said(lambda: backwards(swap=rank == 1)),
        "values": {name: said(lambda given=given: values(rank, given)) for name, given in VALUES.items()},  # type: ignore[misc]
        "equal values": [values(0, given) for given in VALUES.values()],
        "busy": while_the_gpu_is_busy(),
        "right": [torch.equal(*pair) for pair in zip(backwards(swap=False), map(alone, (1, 2)), strict=True)],
    }


def tensors(number: int, rows: int = ROWS) -> list[Tensor]:
    source = torch.Generator().manual_seed(number)
    return [torch.randn(1, rows, HEADS, DIM, generator=source).bfloat16().cuda() for _ in range(3)]


def attend(number: int = 1, rows: int = ROWS, **given: Any) -> tuple[Tensor, Tensor]:
    """The output, and the keys."""
    q, k, v = (shard(x).contiguous().requires_grad_() for x in tensors(number, rows))
    return context_parallel_attention(q, k, v, causal=True, **given), k


def alone(number: int) -> Tensor:
    """The gradient of the keys that one process finds."""
    q, k, v = (x.requires_grad_() for x in tensors(number))
    flash_attn_func(q, k, v, causal=True).square().sum().backward()
    assert k.grad is not None
    return k.grad


def known(rank: int, kinds: tuple[dict[str, Any], dict[str, Any]]) -> str:
    for kind in kinds:
        attend(**kind)[0].sum().backward()
    return said(lambda: attend(**kinds[rank]))


def unshard_another_size(rank: int) -> str:
    for width in (1, 2):
        unshard(torch.ones(1, 8, width, device="cuda"))
    return said(lambda: unshard(torch.ones(1, 8, 1 + rank, device="cuda")))


def backwards(swap: bool) -> list[Tensor]:
    """The gradients of the keys of two calls."""
    (one, k), (other, j) = attend(1), attend(2)
    for out in (other, one) if swap else (one, other):
        out.square().sum().backward()
    return [unshard(x.grad) for x in (k, j) if x.grad is not None]


def values(rank: int, given: dict[str, Any]) -> int:
    """Calls with values of the rank's own. They are compared two calls later, if they have come by then."""
    of_rank = {name: (value + rank).cuda() if isinstance(value, Tensor) else value for name, value in given.items()}
    for _ in range(4):
        attend(**of_rank)
        torch.cuda.synchronize()
    return 4


def while_the_gpu_is_busy() -> tuple[float, bool]:
    """How long a comparison takes, and whether the GPU was busy throughout."""
    peers = Peers.of(None)
    peers.hosts.begin(ATTENTION, [1])
    torch.cuda.synchronize()
    torch.cuda._sleep(ASLEEP)
    behind = torch.cuda.current_stream().record_event()
    start = time.perf_counter()
    peers.hosts.begin(ATTENTION, [1])
    return time.perf_counter() - start, not behind.query()


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """By rank."""
    return run_processes(worker, RANKS, group_limit=30, limit=200)


@pytest.mark.parametrize("fact", KNOWN)
def test_kinds_that_both_ranks_know_are_compared(found: list[dict[str, Any]], fact: str) -> None:
    for rank, words in enumerate(one["known"][fact] for one in found):
        assert words.startswith("RuntimeError: ranks that share a sequence must be asked for the same;"), words
        assert f"rank 0 and rank 1 differ in {fact}. Here, on rank {rank}, it is " in words


def test_rows_of_another_size_are_compared(found: list[dict[str, Any]]) -> None:
    assert all("rank 0 and rank 1 differ in the sizes of other dimensions" in one["unshard"] for one in found)


def test_backwards_in_another_order_name_both_calls(found: list[dict[str, Any]]) -> None:
    words = "RuntimeError: ranks that share a sequence must run their backwards in one order; rank 0 is in that of call "
    assert found[0]["swapped"] == found[1]["swapped"]
    assert found[0]["swapped"].startswith(words)


@pytest.mark.parametrize("name", VALUES)
def test_values_are_compared_when_they_have_come(found: list[dict[str, Any]], name: str) -> None:
    for one in found:
        assert one["values"][name].startswith("RuntimeError: ranks that share a sequence must be asked for the same;")
        assert f"rank 0 and rank 1 differ in the values of {name}, in a call up to number " in one["values"][name]
        assert one["equal values"] == [4] * len(VALUES)  # the control


def test_no_host_waits_for_the_gpu(found: list[dict[str, Any]]) -> None:
    for seconds, busy in (one["busy"] for one in found):
        assert busy
        assert seconds < 0.2


def test_what_follows_is_right(found: list[dict[str, Any]]) -> None:
    assert all(one["right"] == [True, True] for one in found)
