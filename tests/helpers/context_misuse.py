"""What ranks do in the tests of errors and of autograd. All in one run, because starting processes takes longer than what they do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from threading import Thread
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from context_workers import attend, own_inputs
from dash_attn import Documents, Full, TileMap, Window
from dash_attn.distributed import Sharding, context_parallel_attention, positions, shard, unshard
from dash_attn.distributed.context.of_rank import BackwardPass, OfRank
from dash_attn.integrations import sdpa
from dash_attn.scheduling.ranks.units import Unit
from processes import said
from shared_cases import CAUSAL, F64, RANKS, Case, results

ROWS = 256  # of a rank: two chunks of a tile
SMALL = Case(RANKS, RANKS * ROWS, (4, 4), (8, 8), call=CAUSAL)
ONE_DOCUMENT = replace(SMALL, call={**CAUSAL, "cu_seqlens": [0, SMALL.rows]})
ODD = 2  # the rank that differs
LIMIT = 10  # seconds; a busy machine needs some to build a group
LATE_LIMIT = 4

Words = dict[str, str]


def everything(rank: int) -> dict[str, Any]:
    return {
        "differ": _differ(rank),
        "one refuses": _one_refuses(rank),
        "all refuse": _all_refuse(rank),
        "groups": _groups(),
        "autograd": _autograd(rank),
        "layout": _layout(),
        "no sequence": {name: _no_sequence(**given) for name, given in NO_SEQUENCE.items()},
    }


NO_SEQUENCE: dict[str, dict[str, Any]] = {
    "zigzag": {},
    "documents": {"cu_seqlens": (0, 100, RANKS * ROWS)},
    "documents, ulysses": {"cu_seqlens": (0, 100, RANKS * ROWS), "ulysses": 2},
    "dropout": {"dropout_p": 0.5, "dropout_seed": torch.zeros(0, dtype=torch.int64)},
}


def _no_sequence(**given: Any) -> list[Tensor]:
    """Output, LSE and gradients of an empty batch."""
    q, k, v = (torch.zeros(0, ROWS, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    sinks = torch.ones(4, requires_grad=True)
    out, lse = context_parallel_attention(q, k, v, causal=True, sinks=sinks, return_lse=True, **given)  # type: ignore[misc]
    return [out.detach(), lse.detach(), *torch.autograd.grad(out.sum() + lse.sum(), (q, k, v, sinks))]


def _call(rows: int = ROWS, heads: tuple[int, int] = (4, 4), dims: tuple[int, int] = (8, 8), batch: int = 1, **given: Any) -> Tensor:
    """Of tensors of one number, because nobody looks at the result. `tensors` may change them."""
    dtype, needed = given.pop("dtype", torch.float32), given.pop("gradients", False)
    shapes = (batch, rows, heads[0], dims[0]), (batch, rows, heads[1], dims[0]), (batch, rows, heads[1], dims[1])
    q, k, v = (torch.ones(shape, dtype=dtype, requires_grad=needed) for shape in shapes)
    q, k, v = given.pop("tensors", lambda *same: same)(q, k, v)
    return context_parallel_attention(q, k, v, given.pop("group", None), **given)  # type: ignore[return-value]


def _blocks(*dropped: tuple[int, int]) -> TileMap:
    kept = np.ones((8, 8), dtype=np.bool_)
    for place in dropped:
        kept[place] = False
    return TileMap(kept, 128, 128)


class _Unusual(Full):
    def check(self, q_len: int, kv_len: int) -> None:
        raise RuntimeError("a mask that fails in its own way")


SEEDED: dict[str, Any] = {"dropout_p": 0.1, "dropout_seed": torch.tensor([7])}
DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # by the fact that an error names: of most ranks, of the odd one
    "mask": ({"causal": True}, {"causal": False}),
    "mask ": ({"window_size": (200, 0)}, {"window_size": (201, 0)}),
    "mask  ": ({"mask": _blocks((0, 4)), "schedule": "alternating"}, {"mask": _blocks((0, 5)), "schedule": "alternating"}),
    "softmax_scale": ({}, {"softmax_scale": 0.5}),
    "softcap": ({}, {"softcap": 2.0}),
    "schedule": ({}, {"schedule": "alternating"}),
    "head_offset": ({}, {"head_offset": 1}),
    "sharding": ({}, {"sharding": "contiguous"}),
    "sharding ": ({}, {"rows": 2 * ROWS}),
    "cu_seqlens": ({"cu_seqlens": (0, 300, 1024)}, {"cu_seqlens": (0, 301, 1024)}),
    "cu_seqlens ": ({}, {"cu_seqlens": (0, 1024)}),
    "ulysses": ({}, {"ulysses": 2}),
    "ulysses ": ({}, {"ulysses": 4}),
    "ulysses  ": ({"ulysses": 4}, {"ulysses": 2}),
    "the batch size": ({}, {"batch": 2}),
    "the numbers of heads": ({}, {"heads": (8, 4)}),
    "the head dims": ({}, {"dims": (8, 16)}),
    "the dtype": ({}, {"dtype": F64}),
    "the sinks": ({}, {"sinks": torch.zeros(4)}),
    "the sinks ": ({"sinks": torch.zeros(4)}, {"sinks": torch.zeros(4, dtype=F64)}),
    "the sinks  ": ({"sinks": torch.zeros(4)}, {"sinks": torch.tensor([0.0, 0.0, 0.0, 1e-30])}),
    "dropout_p": (SEEDED, {**SEEDED, "dropout_p": 0.2}),
    "dropout_seed": (SEEDED, {**SEEDED, "dropout_seed": torch.tensor([8])}),
    "alibi_slopes": ({}, {"alibi_slopes": torch.ones(4)}),
    "alibi_slopes ": ({"alibi_slopes": torch.ones(4)}, {"alibi_slopes": torch.tensor([1.0, 1.0, 2.0, 1.0])}),
    "whether gradients are needed": ({}, {"gradients": True}),
}

WRONG: dict[str, dict[str, Any]] = {  # what the odd rank refuses
    "q must be a tensor; got list": {"tensors": lambda q, k, v: ([], k, v)},
    "q must be 4-d": {"tensors": lambda q, k, v: (q[0], k, v)},
    "rank 2 has 256 of the 1024 rows, queries and keys alike; got 256 queries and 128 keys": {
        "tensors": lambda q, k, v: (q, k[:, :128], v[:, :128])
    },
    "no backend runs on meta": {"tensors": lambda *tensors: tuple(x.to("meta") for x in tensors)},
    "backend 'hopper' needs cuda tensors; got tensors on cpu": {"backend": "hopper"},
    "sinks must be 4 floating-point numbers": {"sinks": torch.zeros(3)},
    "causal must be True or False; got 'yes'": {"causal": "yes"},
    "return_lse must be True or False; got 'yes'": {"return_lse": "yes"},
    "unknown sharding 'zag'; choose from zigzag, contiguous": {"sharding": "zag"},
    "ulysses must be a whole number >= 1; got 0": {"ulysses": 0},
    "ulysses must divide the number of ranks, which is 4; got 3": {"ulysses": 3},
    "a tile map for q_len=1024": {"mask": TileMap(np.ones((2, 2), dtype=np.bool_), 128, 128)},
    "a mask that fails in its own way": {"mask": _Unusual()},
}

REFUSED: dict[str, dict[str, Any]] = {  # what all ranks refuse
    "8 chunks of equal length fit sequences of 1024 rows": {"rows": 200},
    "8 chunks of equal length fit sequences of 1024 or 2048 rows; pad to that": {"rows": 300},
    "8 chunks of equal length fit sequences of 1024 or 1536 rows; pad to that": {"rows": 300, "ulysses": 2},
    "4 chunks of equal length fit sequences of 512 or 1024 rows; pad to that": {"rows": 200, "sharding": "contiguous"},
    "zigzag sharding of 4 ranks has 8 chunks of equal length; 1020 rows cannot be dealt so (but 1016 or 1024 can)": {"rows": 255},
    "rows must be a whole number >= 1; got 0": {"rows": 0},
    "sum of the document lengths (1000); got 1024 queries": {"mask": Documents((500, 500))},
    "give documents once, as mask=Documents(...) or as cu_seqlens; got both": {"mask": Documents((512, 512)), "cu_seqlens": (0, 1024)},
    "dropout needs a seed for each document": {
        "cu_seqlens": (0, 1024),
        "dropout_p": 0.1,
        "dropout_seed": torch.zeros(1, dtype=torch.int64),
    },
    "must begin with 0 and end with the 1024 rows of all ranks together; got [0, 256]": {"cu_seqlens": (0, 256)},
    "zigzag sharding of 4 ranks has 8 chunks of equal length; 1020 rows cannot be dealt": {"rows": 255, "cu_seqlens": (0, 1020)},
    "ulysses must divide the number of ranks, which is 4; got 8": {"ulysses": 8, "heads": (8, 8)},
    "ulysses must divide the 3 KV heads, because ranks get whole KV heads; got 2. On 4 ranks, 1 do": {"ulysses": 2, "heads": (3, 3)},
    "needs cuda tensors": {"backend": "hopper"},
    "the sharding that was given is for 2 ranks; the group has 4": {"sharding": Sharding((128, 128), (0, 1))},
    "rank 0 has 128 of the 512 rows, queries and keys alike; got 256": {"sharding": Sharding((128,) * 4, (0, 1, 2, 3))},
    "sharding must be a name or a Sharding; got int": {"sharding": 3},
    "chunks must be multiples of 128 rows": {"sharding": Sharding((192,) * 4 + (64,) * 4, (0, 1, 2, 3) * 2)},
    "an order that is a function of the sequence alone; that of shift is not": {"schedule": "shift"},
    "give dropout_seed, the same 1 numbers of torch.int64 on every rank; got dropout_p=0.1 and no dropout_seed": {"dropout_p": 0.1},
    "give either mask or causal/window_size": {"mask": Window(3, 3), "causal": True},
}


def _differ(rank: int) -> Words:
    return {name: said(lambda pair=pair: _call(**pair[rank == ODD])) for name, pair in DIFFERENCES.items()}  # type: ignore[misc]


def _one_refuses(rank: int) -> Words:
    return {words: said(lambda given=given: _call(**(given if rank == ODD else {}))) for words, given in WRONG.items()}  # type: ignore[misc]


def _all_refuse(rank: int) -> Words:
    return {words: said(lambda given=given: _call(**given)) for words, given in REFUSED.items()}  # type: ignore[misc]


def _groups() -> dict[str, Any]:
    plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    pair = dist.new_group([0, 1])
    by_rank = dist.new_group(list(range(RANKS)), backend="cpu:gloo")
    return {
        "mesh of two dimensions": said(lambda: _call(group=plane)),
        "not a member": said(lambda: _call(group=pair)) if dist.get_rank() > 1 else "",
        "no group": said(lambda: _call(group=3)),
        "another function": said(lambda: unshard(torch.ones(1, 8)) if dist.get_rank() == ODD else _call()),
        "the door refuses": said(_through_the_door),
        "mesh": _call(group=init_device_mesh("cpu", (RANKS,))).shape,
        "part of a mesh": _call(group=plane["shard"]).shape,
        "a backend per device": _call(group=by_rank, ulysses=2).shape,
        "unshard with gradient": said(lambda: unshard(torch.ones(1, 8, requires_grad=True))),
        "unshard without": unshard(torch.ones(1, 8)).shape,
        "two threads": _two_threads(),
    }


def _two_threads() -> list[str]:
    """Each with a group of its own. Ranks begin with different ones: a rank must not let one wait for the other."""
    groups = [dist.new_group(list(range(RANKS)), timeout=timedelta(seconds=LIMIT)) for _ in range(2)]
    first = dist.get_rank() % 2
    found = ["", ""]

    def gather(place: int) -> None:
        time.sleep(0 if place == first else 1)
        found[place] = said(lambda: unshard(torch.ones(1, 8), groups[place]).shape)

    threads = [Thread(target=gather, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _through_the_door() -> Tensor:
    """Padding, it may be, on one rank."""
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool) if dist.get_rank() == ODD else None
    with sdpa.enable(context_parallel=dist.group.WORLD):
        return functional.scaled_dot_product_attention(*(torch.ones(1, 4, ROWS, 8) for _ in range(3)), attn_mask=mask)


def _autograd(rank: int) -> dict[str, Any]:
    return {
        **_ways(),
        "saved bytes": _saved_bytes(),
        "double backward": said(_double_backward),
        "changed in place": said(lambda: _change_in_place(rank == ODD)),
        "one rank uses its LSE": _one_uses_lse(rank, SMALL),
        "one rank uses its LSE, ulysses": _one_uses_lse(rank, replace(SMALL, ulysses=2)),
        "one rank uses its LSE, one document": _one_uses_lse(rank, ONE_DOCUMENT),
        "a traced tensor of offsets": said(lambda: torch.compile(_call, backend="eager")(cu_seqlens=torch.tensor([0, RANKS * ROWS]))),
        "nothing needs gradients": _call().requires_grad,
    }


def _gradients(attention: Callable[..., tuple[Tensor, Tensor]], case: Case = SMALL) -> list[Tensor]:
    inputs = own_inputs(case, None)
    out, lse = attention(case, inputs, None)
    found = results(case, out, lse, [inputs.q, inputs.k, inputs.v], (inputs.dout, inputs.dlse))
    return list(found.values())


def _ways() -> dict[str, list[Tensor]]:
    def checkpointed(*arguments: Any) -> tuple[Tensor, Tensor]:
        return checkpoint(attend, *arguments, use_reentrant=False)  # type: ignore[no-any-return]

    with_ulysses = replace(SMALL, ulysses=2)
    return {
        "once": _gradients(attend),
        "twice": _gradients(attend),
        "checkpointed": _gradients(checkpointed),
        "checkpointed, ulysses": _gradients(checkpointed, with_ulysses),
        "checkpointed, one document": _gradients(checkpointed, ONE_DOCUMENT),
        "traced, one document": _gradients(torch.compile(attend, backend="eager"), ONE_DOCUMENT),
    }


def _saved_bytes() -> tuple[int, int]:
    """What autograd keeps, and what the rank's own tensors are: q, k, v, out and lse."""
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    inputs = own_inputs(SMALL, None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out, lse = attend(SMALL, inputs, None)
    own = inputs.q, inputs.k, inputs.v, out, lse
    return sum(kept.values()), sum(x.numel() * x.element_size() for x in own)


def _double_backward() -> None:
    inputs = own_inputs(SMALL, None)
    out, _ = attend(SMALL, inputs, None)
    (dq,) = torch.autograd.grad(out.square().sum(), inputs.q, create_graph=True)
    dq.sum().backward()  # type: ignore[no-untyped-call]


def _change_in_place(here: bool) -> None:
    inputs = own_inputs(SMALL, None)
    with torch.no_grad():
        q = inputs.q * 1
    q.requires_grad_()
    out, _ = attend(SMALL, replace(inputs, q=q), None)
    with torch.no_grad():
        if here:
            q[0, 0] += 1
    out.sum().backward()  # type: ignore[no-untyped-call]


def _one_uses_lse(rank: int, case: Case) -> list[Tensor]:
    inputs = own_inputs(case, None)
    out, lse = attend(case, inputs, None)
    loss = (out * inputs.dout).sum() + ((lse * inputs.dlse).sum() if rank == ODD else 0)
    return list(torch.autograd.grad(loss, [inputs.q, inputs.k, inputs.v]))


def _layout() -> dict[str, Any]:
    own, odd = Sharding((3, 5, 1, 2), (1, 0, 3, 2)), dist.get_rank() == ODD
    x = torch.arange(2 * 24 * 3).view(2, 24, 3)
    rows = [
        torch.arange(24),
        torch.arange(48).view(24, 2),
        torch.arange(48.0).view(2, 24),
        x,
        torch.arange(288).view(3, 2, 24, 2).bfloat16(),
        torch.ones(0, 24, 2),
    ]
    dims = [0, 0, 1, -2, 2, 1]
    leaf = torch.arange(24.0).requires_grad_()
    shard(leaf, dim=0).sum().backward()  # type: ignore[no-untyped-call]
    return {
        "zigzag": positions(24),
        "contiguous": positions(24, sharding="contiguous"),
        "own": positions(11, sharding=own),
        "there and back": all(
            torch.equal(unshard(shard(y, dim=dim, sharding=name), dim=dim, sharding=name), y)
            for y, dim in zip(rows, dims, strict=True)
            for name in ("zigzag", "contiguous")
        ),
        "there and back, own": torch.equal(unshard(shard(x[:, :11], sharding=own), sharding=own), x[:, :11]),
        "shard": shard(torch.arange(24), dim=0),
        "gradient": leaf.grad,
        "errors": {
            "does not fit": said(lambda: shard(torch.ones(2, 20))),
            "dim": said(lambda: shard(torch.ones(2, 24), dim=2)),
            "tensor": said(lambda: shard([1, 2])),  # type: ignore[arg-type]
            "own rows": said(lambda: unshard(torch.ones(2, 4), sharding=own)),
            "positions": said(lambda: positions(20)),
            "dtype of one": said(lambda: unshard(torch.ones(2, 6, dtype=F64 if odd else torch.float32))),
            "rows of one": said(lambda: unshard(torch.ones(2, 8 if odd else 6))),
            "shape of one": said(lambda: unshard(torch.ones(3 if odd else 2, 6))),
            "one refuses": said(lambda: unshard(torch.ones(2, 6, requires_grad=odd))),
            "sparse on one": said(lambda: unshard(torch.ones(2, 6).to_sparse() if odd else torch.ones(2, 6))),
            "no values on one": said(lambda: unshard(torch.ones(2, 6, device="meta" if odd else "cpu"))),
        },
    }


def lost_ranks(rank: int) -> dict[str, Any]:
    """Rank 1 dies in the forward of a pair; rank 2 comes too late to a pair; rank 3 dies in the backward of three."""
    limits = timedelta(seconds=LIMIT)
    forward = dist.new_group([0, 1], timeout=limits)
    late = dist.new_group([0, 2], timeout=timedelta(seconds=LATE_LIMIT))
    backward = dist.new_group([0, 2, 3], timeout=limits)
    found: dict[str, Any] = {}
    if rank < 2:
        OfRank.forward = _dying if rank == 1 else OfRank.forward  # type: ignore[method-assign]
        found["forward"] = _timed(lambda: _attention_of(2, forward))
    if rank in (0, 2):
        time.sleep(2.5 * LATE_LIMIT if rank == 2 else 0)
        found["late"] = _timed(lambda: _attention_of(2, late))
    if rank == 3:
        BackwardPass.step = _dying_step  # type: ignore[method-assign]
    found["backward"] = _timed(lambda: _attention_of(3, backward))
    return found


def _timed(action: Callable[[], object]) -> dict[str, Any]:
    start = time.monotonic()
    return {"words": said(action), "seconds": time.monotonic() - start}


def lost_among_documents(rank: int) -> dict[str, Any]:
    """Rank 2 dies in the backward."""
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=LIMIT))
    if rank == 2:
        BackwardPass.step = _dying_step  # type: ignore[method-assign]
    return _timed(lambda: _attention_of(3, group, cu_seqlens=[0, 50, 3 * ROWS]))


def _attention_of(ranks: int, group: Any, **more: Any) -> None:
    case = Case(ranks, ranks * ROWS, (2, 2), (8, 8), call={**CAUSAL, **more})
    inputs = own_inputs(case, group)
    out, _ = attend(case, inputs, group)
    out.sum().backward()  # type: ignore[no-untyped-call]


def _dying(*_: Any) -> Any:
    os._exit(0)


_step = BackwardPass.step
_steps = 0


def _dying_step(self: BackwardPass, unit: Unit) -> None:
    """It dies with some of its units run: the first has sent its states."""
    global _steps
    _steps += 1
    if _steps > 3:
        os._exit(0)
    _step(self, unit)
