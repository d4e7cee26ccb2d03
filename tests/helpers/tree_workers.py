"""What ranks do in the tests of sums over micro-batches. Functions of a module, so that new processes can import them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from dash_attn.distributed import MicroBatchSampler, TreeAccumulator
from dash_attn.distributed.micro_batches import buckets
from dash_attn.distributed.micro_batches.tree import fitting_ranks, tree_sum
from processes import said
from tree_models import OddModel, backward, bits, gradients, mlp

RANKS = 4
MANY_RANKS = 7  # no power of two
LATE_LIMIT = 3  # seconds; a busy machine needs some to build a group
COUNTS = [*range(1, 18), 64]
DDP_OPTIONS: list[dict[str, bool]] = [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}]
MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "odd": OddModel}


def mean(model: nn.Module, micro_batches: int, group: Any, indices: Callable[[range], list[int]] = list) -> str:
    """Bits of the mean. `indices` may tamper with what a rank adds."""
    accumulator = TreeAccumulator(micro_batches, group)
    for index in indices(accumulator.owned):
        backward(model, index)
        accumulator.add(model)
    accumulator.finish(model)
    return bits(gradients(model).values())


def all_reduced(micro_batches: int, group: Any) -> str:
    """The control: PyTorch's accumulation, then an all-reduce."""
    model = mlp()
    for index in TreeAccumulator(micro_batches, group).owned:
        backward(model, index)
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= micro_batches
    return bits(gradients(model).values())


def everything(rank: int) -> dict[str, dict[Any, Any]]:
    """All in one, because starting processes takes longer than what they do."""
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in range(1, RANKS + 1)}
    return {
        **_means(rank, groups),
        **_training(rank, groups),
        "groups": _kinds_of_group(groups[2]),
        "faults": _faults(),
        "errors": _errors(rank),
        "late": _late(rank),
    }


def _means(rank: int, groups: dict[int, Any]) -> dict[str, dict[Any, str]]:
    """By hand: (model, micro-batches, ranks) -> bits, and the control."""
    cases = [(count, ranks) for count in COUNTS for ranks in fitting_ranks(count) if rank < ranks <= RANKS]
    return {
        "means": {(name, count, ranks): mean(MODELS[name](), count, groups[ranks]) for name in MODELS for count, ranks in cases},
        "all-reduce": {(count, ranks): all_reduced(count, groups[ranks]) for count, ranks in cases},
    }


def _kinds_of_group(pair: Any) -> dict[str, str]:
    plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    return {
        "world": mean(mlp(), 8, None),
        "mesh": mean(mlp(), 8, init_device_mesh("cpu", (RANKS,))),
        "part of a mesh": mean(mlp(), 8, plane["shard"]),
        "mesh of two dimensions": said(lambda: TreeAccumulator(8, plane)),
        "not a member": said(lambda: TreeAccumulator(8, pair)),
    }


def _swapped(terms: Any, add: Any) -> Any:
    return tree_sum([terms[0], terms[2], terms[1], terms[3]], add)


def _rounded(terms: Any, add: Any) -> Any:
    return tree_sum([term.to(torch.bfloat16).to(term.dtype) for term in terms], add)


@contextmanager
def _planted(sum_of_ranks: Callable[[Any, Any], Any]) -> Iterator[None]:
    buckets.tree_sum = sum_of_ranks
    yield
    buckets.tree_sum = tree_sum


def _faults() -> dict[str, str]:
    found = {"none": mean(mlp(), 8, None)}
    with _planted(_swapped):
        found["subtrees swapped"] = mean(mlp(), 8, None)
    with _planted(_rounded):
        found["partial sums rounded"] = mean(mlp(), 8, None)
    found["one twice, one left out"] = mean(mlp(), 8, None, lambda owned: [owned[0], owned[0]] if owned[0] == 2 else list(owned))
    found["two swapped"] = mean(mlp(), 8, None, lambda owned: [{1: 2, 2: 1}.get(index, index) for index in owned])
    found["left out"] = said(lambda: mean(mlp(), 8, None, lambda owned: list(owned)[: 1 if 4 in owned else None]))
    found["none again"] = mean(mlp(), 8, None)
    return found


def _errors(rank: int) -> dict[str, str]:
    return {
        "n": said(lambda: mean(mlp(), 16 if rank == 2 else 8, None)),
        "model": said(lambda: mean(OddModel() if rank == 1 else mlp(), 8, None)),
        "frozen": said(lambda: mean(_frozen_bias() if rank == 3 else mlp(), 8, None)),
        "divide": said(lambda: _finish_with(divide=rank != 1)),
        "one refuses": said(lambda: _finish_with(divide="yes" if rank == 2 else True)),  # type: ignore[arg-type]
        "step": said(lambda: _finish_with(steps_before=int(rank == 3))),
        "ranks": said(lambda: TreeAccumulator(3, None)),
        "ddp reduces": said(lambda: _ddp_outside_no_sync(forward_inside=False)),
        "ddp reduces after forward": said(lambda: _ddp_outside_no_sync(forward_inside=True)),
    }


def _frozen_bias() -> nn.Module:
    model = mlp()
    model[0].bias.requires_grad_(False)  # type: ignore[index]
    return model


def _finish_with(divide: bool = True, steps_before: int = 0) -> None:
    model, accumulator = mlp(), TreeAccumulator(4)
    accumulator._step = steps_before
    backward(model, 0)
    accumulator.add(model)
    accumulator.finish(model, divide=divide)


def _ddp_outside_no_sync(forward_inside: bool) -> None:
    """Once nothing is inside no_sync, once the forward pass alone is outside: DDP reduces in both."""
    model, accumulator = DistributedDataParallel(mlp()), TreeAccumulator(4)
    if not forward_inside:
        backward(model, 0)
        accumulator.add(model)
    loss = model(torch.ones(2, 6)).sum()
    with model.no_sync():
        loss.backward()
        accumulator.add(model)


def _training(rank: int, groups: dict[int, Any]) -> dict[str, dict[Any, str]]:
    """(micro-batches, ranks) -> weights after three steps, in DDP and bare; and with DDP's own reduction, the control."""
    cases = [(8, 1), (8, 2), (8, 4), (6, 1), (6, 3), (5, 2), (5, 3)]
    mine = [(count, ranks) for count, ranks in cases if rank < ranks]
    return {
        "in DDP": {(count, ranks): _trained(count, groups[ranks], _tree_step_in_ddp, wrapped=True) for count, ranks in mine},
        "bare": {(count, ranks): _trained(count, groups[ranks], _tree_step, wrapped=False) for count, ranks in mine},
        "odd in DDP": {repr(options): _odd_in_ddp(options) for options in DDP_OPTIONS},
        "by DDP": {(count, ranks): _trained(count, groups[ranks], _ddp_step, wrapped=True) for count, ranks in mine if count == 8},
    }


def _odd_in_ddp(options: dict[str, bool]) -> str:
    model = DistributedDataParallel(OddModel(), **options)  # type: ignore[arg-type]
    with model.no_sync():
        return mean(model, 7, None)


def _trained(count: int, group: Any, step: Callable[..., None], wrapped: bool) -> str:
    model: nn.Module = mlp()
    if wrapped:
        model = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.randn(3 * 2 * count, 6, generator=torch.Generator().manual_seed(5))
    sampler, accumulator = MicroBatchSampler(len(data), 2, count, group), TreeAccumulator(count, group)
    loaded = [batch for (batch,) in DataLoader(TensorDataset(data), batch_sampler=sampler)]
    owned = len(accumulator.owned)
    for first in range(0, len(loaded), owned):
        optimizer.zero_grad()
        step(model, loaded[first : first + owned], accumulator)
        optimizer.step()
    return bits(model.parameters())


def _tree_step(model: nn.Module, micro_batches: list[Tensor], accumulator: TreeAccumulator) -> None:
    for x in micro_batches:
        model(x).square().sum().backward()
        accumulator.add(model, weight=len(x))
    accumulator.finish(model)


def _tree_step_in_ddp(model: DistributedDataParallel, micro_batches: list[Tensor], accumulator: TreeAccumulator) -> None:
    with model.no_sync():
        _tree_step(model, micro_batches, accumulator)


def _ddp_step(model: DistributedDataParallel, micro_batches: list[Tensor], _: TreeAccumulator) -> None:
    *first, last = micro_batches
    with model.no_sync():
        for x in first:
            (model(x).square().sum() / (2 * len(micro_batches))).backward()
    (model(last).square().sum() / (2 * len(micro_batches))).backward()


def many_means(rank: int) -> dict[tuple[int, int, int], str]:
    """(micro-batches, ranks, bytes per bucket) -> bits."""
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in range(1, MANY_RANKS + 1)}
    found = {}
    for buckets.BUCKET_BYTES in (1, 100):
        for count in (*range(1, 15), 20, 24, 28, 40):
            for ranks in fitting_ranks(count):
                if rank < ranks <= MANY_RANKS:
                    found[count, ranks, buckets.BUCKET_BYTES] = mean(OddModel(), count, groups[ranks])
    return found


def means_on_one_gpu(rank: int) -> dict[tuple[str, int, int], str]:
    """As by hand on the CPU; all ranks share the GPU, and gloo carries the messages."""
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in (1, 2, 4)}
    cases = [(name, count, ranks) for name in MODELS for count in (4, 8, 13) for ranks in groups if rank < ranks]
    return {(name, count, ranks): mean(MODELS[name]().cuda(), count, groups[ranks]) for name, count, ranks in cases}


def _late(rank: int) -> dict[str, Any]:
    """Rank 1 comes long after the group's time limit."""
    dist.barrier()
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=LATE_LIMIT))
    if rank > 1:
        return {}
    time.sleep(1.7 * LATE_LIMIT * rank)
    return _finish_a_step(pair)


def a_rank_dies(rank: int) -> dict[str, Any]:
    if rank == 1:
        os._exit(0)
    return _finish_a_step(None)


def _finish_a_step(group: Any) -> dict[str, Any]:
    start = time.monotonic()
    return {"words": said(lambda: mean(mlp(), 4, group)), "seconds": time.monotonic() - start}
