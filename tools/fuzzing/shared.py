"""Random sequences that ranks share, all of them played by one process. Bit by bit they are those of flash_attn_func."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from dash_attn import flash_attn_func
from dash_attn.call.options import Choices, options_for
from dash_attn.distributed.context.loopback import play_all_ranks
from dash_attn.distributed.context.rows import sharding_for
from dash_attn.distributed.context.shared_call import SharedCall
from fuzzing.call import Call, Leaves, Modifiers, OutAndLse, answers, each, in_rows
from fuzzing.drawing import Attended, by_definition
from shared_cases import Case
from shared_problems import random_case

MOST = 1024  # query rows of all heads and sequences: more take seconds


def size(case: Case) -> int:
    return case.rows * case.heads[0] * case.batch


class AllRanks(torch.autograd.Function):
    """Forward and backward in one go, by a gradient of the output that is known before."""

    @staticmethod
    def forward(ctx: object, shared: SharedCall, dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        found = play_all_ranks(shared, q, k, v, dout)
        ctx.save_for_backward(found.dq, found.dk, found.dv)  # type: ignore[attr-defined]
        return found.out, found.lse

    @staticmethod
    def backward(ctx: object, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.saved_tensors  # type: ignore[attr-defined]


def played(random: Random, _: str) -> Call:
    case = next(case for case in iter(lambda: random_case(random.getrandbits(30), random.randint(2, 4)), None) if size(case) <= MOST)
    (heads, kv_heads), (dim, v_dim), rows = case.heads, case.dims, (case.batch, case.rows)
    source = torch.Generator().manual_seed(random.getrandbits(62))
    sizes = {"q": (heads, dim), "k": (kv_heads, dim), "v": (kv_heads, v_dim), "out": (heads, v_dim)}
    tensors = {name: torch.randn(*rows, *size, generator=source, dtype=torch.float64).to(case.dtype) for name, size in sizes.items()}
    dout = tensors.pop("out")
    options = options_for(Choices(**case.call), dim)
    shared = SharedCall.of(tuple(tensors.values()), options, sharding_for(case.sharding, case.rows, case.ranks))  # type: ignore[arg-type]

    def run(leaves: Leaves) -> OutAndLse:
        out: tuple[Tensor, Tensor] = AllRanks.apply(shared, dout, *map(leaves.get, "qkv"))  # type: ignore[no-untyped-call]
        return out

    attended = [Attended({}, by_definition(options.mask, case.rows, case.rows).keep)] * case.batch
    call = Call("context_parallel_attention, ranks played", str(case), tensors, run, each, in_rows, attended)
    call.modifiers = Modifiers({"softmax_scale": options.scale, "softcap": options.softcap})
    call.cotangents = (dout,)
    call.run_alone = answers(flash_attn_func, **case.call)
    return call
