"""Train a small language model on 1, 2 and 4 processes, and compare the bits of its weights.

python examples/long_context.py                        (starts four processes)
torchrun --nproc-per-node 4 examples/long_context.py   (the same)
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dash_attn import flash_attn_func
from dash_attn.distributed import TreeAccumulator, context_parallel_attention, positions, shard, unshard

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 64, 4, 2, 16, 2
RANKS = (1, 2, 4)  # numbers of processes to compare
SEQUENCES, SHORT, LONG, STEPS = 8, 128, 1024, 2  # short sequences belong to one process each, a long one to all
CHUNKS = 2 * max(RANKS)  # those of the largest number of processes. They stay the same on fewer.
CHUNK = LONG // CHUNKS  # 128 tokens: a chunk must be a multiple of a tile

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """Attention is left out: it is the only layer that sees several chunks at once."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def before(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], dim=2)
        return rotated(q, places), rotated(k, places), v

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.out(attended.flatten(-2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))


def rotated(x: Tensor, places: Tensor) -> Tensor:
    """Rotary embedding. `places` are those in the whole sequence, not those among the rows of a process."""
    angles = places[:, None, None] * 100.0 ** -torch.linspace(0, 1, HEAD_DIM // 2)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos()], dim=-1)


def loss_of(models: Sequence[Any], attend: Attend, tokens: Tensor, labels: Tensor, places: Tensor) -> Tensor:
    """The sum over all tokens. The rows are cut into as many stretches as there are models, and each model works on its own stretch."""
    size = tokens.shape[1] // len(models)
    wheres = places.split(size)
    xs = [model.embed(stretch) for model, stretch in zip(models, tokens.split(size, dim=1), strict=True)]
    for layer in range(LAYERS):
        blocks = [model.blocks[layer] for model in models]
        parts = [block.before(x, where) for block, x, where in zip(blocks, xs, wheres, strict=True)]
        q, k, v = (torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))
        attended = attend(q, k, v).split(size, dim=1)
        xs = [block.after(x, one) for block, x, one in zip(blocks, xs, attended, strict=True)]
    logits = [model.head(x).flatten(0, 1) for model, x in zip(models, xs, strict=True)]
    wanted = labels.flatten().split(size)
    return torch.stack([cross_entropy(one, label, reduction="sum") for one, label in zip(logits, wanted, strict=True)]).sum()


def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_func(q, k, v, causal=True)


# Data parallelism: each process has some sequences of a step, whole.


def tree_over_sequences(model: nn.Module, group: Any) -> Tensor:
    """Gradients are added in one tree over all sequences of the step."""
    accumulator, total = TreeAccumulator(SEQUENCES, group), torch.zeros(())
    for index in accumulator.owned:
        loss = loss_of([model], whole, *sequence(SHORT, index), torch.arange(SHORT))
        loss.backward()
        accumulator.add(model, weight=SHORT)
        total += loss.detach()
    accumulator.finish(model)
    return total / (SEQUENCES * SHORT)


def all_reduce_over_sequences(model: nn.Module, group: Any) -> Tensor:
    """The control. Each process adds its sequences one after another, then an all-reduce adds the processes."""
    total = torch.zeros(())
    for index in TreeAccumulator(SEQUENCES, group).owned:
        loss = loss_of([model], whole, *sequence(SHORT, index), torch.arange(SHORT))
        loss.backward()
        total += loss.detach()
    all_reduce_gradients(model, SEQUENCES * SHORT, group)
    return total / (SEQUENCES * SHORT)


# Context parallelism: all processes share one long sequence.


def tree_over_chunks(model: nn.Module, group: Any) -> Tensor:
    """Layers other than attention work chunk by chunk. The gradients of chunks are added in one tree over all chunks.

    In zigzag, a process has chunks from both ends. So leaf 0 of the tree is the first chunk, leaf 1 the last, leaf 2 the second, and
    so on inwards. The chunks of a process are then a subtree, whatever the number of processes.
    """
    places = positions(LONG, group)
    twins = {chunk: twin(model) for chunk in (places[::CHUNK] // CHUNK).tolist()}
    loss = loss_of(list(twins.values()), shared(group), *shards(group), places)
    loss.backward()
    accumulator = TreeAccumulator(CHUNKS, group)
    for leaf in accumulator.owned:
        chunk = CHUNKS - 1 - leaf // 2 if leaf % 2 else leaf // 2
        for parameter, its in zip(model.parameters(), twins[chunk].parameters(), strict=True):
            parameter.grad = its.grad
        accumulator.add(model, weight=CHUNK)
    accumulator.finish(model)
    return loss.detach() / LONG


def all_reduce_over_ranks(model: nn.Module, group: Any) -> Tensor:
    """The control. Attention is the same, but layers work on all rows of a process at once, and an all-reduce adds the processes."""
    loss = loss_of([model], shared(group), *shards(group), positions(LONG, group))
    loss.backward()
    all_reduce_gradients(model, LONG, group)
    return loss.detach() / LONG


def shared(group: Any) -> Attend:
    return lambda q, k, v: context_parallel_attention(q, k, v, group, causal=True)


def shards(group: Any) -> Iterable[Tensor]:
    return (shard(x, group) for x in sequence(LONG, 0))


def twin(model: nn.Module) -> nn.Module:
    """The same weights in the same memory, with gradients of its own."""
    other = copy.deepcopy(model)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        its.data, its.grad = mine.data, None
    return other


# Attention alone: output and gradients of one long sequence.


def one_call(_: Any) -> str:
    """flash_attn_func on the whole sequence: what the others are compared with."""
    *tensors, dout = random_tensors()
    q, k, v = (x.requires_grad_() for x in tensors)
    out = whole(q, k, v)
    out.backward(dout)
    return fingerprint([out, q.grad, k.grad, v.grad])


def states_travel(group: Any) -> str:
    *tensors, dout = (shard(x, group) for x in random_tensors())
    q, k, v = (x.requires_grad_() for x in tensors)
    out = shared(group)(q, k, v)
    out.backward(dout)
    return fingerprint([unshard(x.detach(), group) for x in (out, q.grad, k.grad, v.grad)])


def partial_sums(group: Any) -> str:
    """The control. Each process computes dK and dV of its own queries, and an all-reduce adds them."""
    q, k, v, dout = random_tensors()
    mine = positions(LONG, group, sharding="contiguous")
    first, end = int(mine[0]), int(mine[-1]) + 1
    q, k, v = (x.requires_grad_() for x in (q[:, first:end], k[:, :end], v[:, :end]))
    out = whole(q, k, v)
    out.backward(dout[:, first:end])
    sums = [torch.cat([x.grad, torch.zeros(1, LONG - end, *x.shape[2:])], dim=1) for x in (k, v)]
    for x in sums:
        dist.all_reduce(x, group=group)
    return fingerprint([*(unshard(x.detach(), group, sharding="contiguous") for x in (out, q.grad)), *sums])


def random_tensors() -> list[Tensor]:
    source = torch.Generator().manual_seed(2)
    return [torch.randn(1, LONG, heads, HEAD_DIM, generator=source) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]


# What all of them need.


def sequence(length: int, index: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of a sequence that counts up, from its own start in its own stride. All steps have the same ones."""
    source = torch.Generator().manual_seed(index)
    start, stride = torch.randint(1, VOCABULARY, (2,), generator=source)
    tokens = (start + stride * torch.arange(length + 1)) % VOCABULARY
    return tokens[None, :-1], tokens[None, 1:]


def all_reduce_gradients(model: nn.Module, tokens: int, group: Any) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= tokens


def train(step_of: Callable[[nn.Module, Any], Tensor], group: Any) -> str:
    """A hash of the weights at the end, which all processes of the group must have."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        loss = step_of(model, group)
        dist.all_reduce(loss, group=group)  # to be shown; weights do not depend on it
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0], f"the model must learn; its losses are {losses}"
    bits = [fingerprint(model.parameters())] * dist.get_world_size(group)
    dist.all_gather_object(bits, bits[0], group)
    assert len(set(bits)) == 1, f"processes have different weights: {bits}"
    return bits[0]


def fingerprint(tensors: Iterable[Any]) -> str:
    return hashlib.sha256(b"".join(x.detach().contiguous().numpy().tobytes() for x in tensors)).hexdigest()[:8]


ROWS: dict[str, Callable[[Any], str]] = {
    "training, data parallel, one tree": lambda group: train(tree_over_sequences, group),
    "training, data parallel, all-reduce (control)": lambda group: train(all_reduce_over_sequences, group),
    "attention, one call on one process": one_call,
    "attention, context parallel": states_travel,
    "attention, all-reduce of dK and dV (control)": partial_sums,
    "training, context parallel, one tree": lambda group: train(tree_over_chunks, group),
    "training, context parallel, all-reduce (control)": lambda group: train(all_reduce_over_ranks, group),
}
WORDS = """
Promised, on any number of processes:
- Weights that are trained on whole sequences, if TreeAccumulator adds the gradients of the sequences.
- Output and gradients of context_parallel_attention: they are those of one call on one process.
Not promised: the rest of a model that shares a sequence. Its layers must work on the same stretches of tokens whatever the number
of processes, and the gradients of its weights must be added in one order. Here "one tree" does both. The control does neither: its
attention has the bits of one process, and its weights have not."""


def work(rank: int, count: int) -> None:
    """What each process does. The first P of them are the group of P; the others wait."""
    torch.set_num_threads(1)  # as many everywhere: PyTorch's own layers may sum in another order with more
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in RANKS if ranks <= count}
    if rank == 0:
        print(f"{'':50}" + "".join(f"{f'{ranks} ranks' if ranks > 1 else '1 rank':10}" for ranks in groups))
    for name, run in ROWS.items():
        found = [run(group) for ranks, group in groups.items() if rank < ranks]
        if rank == 0:
            verdict = "equal" if len(set(found)) == 1 else "differ"
            print(f"{name:50}" + "".join(f"{bits:10}" for bits in found) + verdict, flush=True)
    if rank == 0:
        print(WORDS)
    dist.barrier()  # a process that ends early would take its connections along
    dist.destroy_process_group()


def start(rank: int, count: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=count)
    work(rank, count)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()  # --help
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        work(dist.get_rank(), dist.get_world_size())
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(start, (max(RANKS), f"{folder}/store"), nprocs=max(RANKS))


if __name__ == "__main__":
    main()
