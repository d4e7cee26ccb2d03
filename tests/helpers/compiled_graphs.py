"""Compiled and captured calls in a fresh process: python -c "from compiled_graphs import main; main('reduce-overhead')".

A first call there is the one that a graph is warmed up with, so whatever it prepares is prepared inside the graph's pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dash_attn import Causal, TileMap, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from inputs import make_inputs

Call = Callable[..., Tensor]
RUNS = 4  # one warms up, one records, the others replay


def families() -> Iterator[tuple[str, Call, list[Tensor]]]:
    """Each with a length of its own, so that its first call prepares something."""
    seeds, slopes = torch.tensor([3, 4], device="cuda"), torch.rand(4, device="cuda")
    sinks = torch.randn(4, device="cuda")
    matrix = torch.rand(520, 520, device="cuda") < 0.5
    blocks = TileMap(torch.eye(9).bool().numpy(), 64, 64)
    yield "dense", lambda q, k, v: flash_attn_func(q, k, v, causal=True), tensors(500)
    yield "full", lambda q, k, v: flash_attn_func(q, k, v), tensors(2100)
    yield "documents", lambda q, k, v: flash_attn_func(q, k, v, mask=documents()), tensors(510)
    yield "boolean", lambda q, k, v: flash_attn_func(q, k, v, mask=matrix), tensors(520)
    yield "blocks", lambda q, k, v: flash_attn_func(q, k, v, mask=blocks), tensors(530)
    yield "Triton", lambda q, k, v: flash_attn_func(q, k, v, mask=blocks, backend="triton"), tensors(535)
    yield "dropout", lambda q, k, v: flash_attn_func(q, k, v, 0.2, causal=True, dropout_seed=seeds), tensors(540)
    yield "ALiBi", lambda q, k, v: flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes), tensors(550)
    yield "sinks", lambda q, k, v, sinks: flash_attn_func(q, k, v, causal=True, sinks=sinks), [*tensors(560), sinks]
    ends = torch.tensor([0, 100, 101, 570], dtype=torch.int32, device="cuda")
    packed = [x[0] for x in tensors(570)]
    yield "packed", lambda q, k, v: flash_attn_varlen_func(q, k, v, ends, ends, 469, 469, causal=True), packed
    last = torch.arange(4, dtype=torch.int32, device="cuda")  # a query each
    few = [packed[0][:3].clone(), *packed[1:]]
    yield "few packed", lambda q, k, v: flash_attn_varlen_func(q, k, v, last, ends, 1, 570, causal=True), few


def documents() -> Any:
    from dash_attn import Documents

    return Documents((300, 200, 10))


def tensors(length: int) -> list[Tensor]:
    return list(make_inputs("cuda", (length, length), (4, 2), (64, 0), batch=2)[:3])


def results(call: Call, given: list[Tensor], dout: Tensor) -> list[Tensor]:
    """Output and gradients, as copies: the next replay overwrites them."""
    leaves = [x.detach().requires_grad_() for x in given]
    torch.compiler.cudagraph_mark_step_begin()
    out = call(*leaves)
    return [x.detach().clone() for x in (out, *torch.autograd.grad(out, leaves, dout))]


def check_compiled(name: str, call: Call, given: list[Tensor], mode: str) -> None:
    from torch._dynamo.utils import counters

    dout = torch.randn_like(given[0])
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(call, mode=mode, fullgraph=True)
    found = [results(compiled, given, dout) for _ in range(RUNS)]
    assert name == "boolean" or not counters["inductor"]["cudagraph_skips"], f"{name}: no graph was made"
    compare(name, found, results(call, given, dout))


def compare(name: str, found: list[list[Tensor]], expected: list[Tensor]) -> None:
    for number, run in enumerate(found):
        differ = [place for place, (a, b) in enumerate(zip(run, expected, strict=True)) if not torch.equal(a, b)]
        assert not differ, f"{name}: results {differ} of run {number} have other bits than those of an eager call"
    print(f"{name}: the bits of eager calls", flush=True)


def check_cache(mode: str) -> None:
    """Attends, and appends too: then the cache is a result."""
    q, k, v = (x[:, :1] for x in tensors(8))
    lengths = torch.tensor([100, 33], dtype=torch.int32, device="cuda")

    def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, causal=True)

    def append(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)

    with torch.no_grad():
        for name, call in (("cache", attend), ("append", append)):
            compiled, (_, *caches) = torch.compile(call, mode=mode, fullgraph=True), tensors(256)
            ours, theirs = ([x.clone() for x in caches] for _ in range(2))
            found = [[x.clone() for x in (compiled(q, *ours), *ours)] for _ in range(RUNS)]
            compare(name, found, [call(q, *theirs), *theirs])


def check_drawn_seeds(mode: str) -> None:
    """Dropout draws its seeds: every replay has others."""
    given = tensors(580)
    compiled = torch.compile(lambda q, k, v: flash_attn_func(q, k, v, 0.2, causal=True), mode=mode, fullgraph=True)
    found = [results(compiled, given, torch.ones_like(given[0]))[0] for _ in range(RUNS)]
    assert not any(torch.equal(a, b) for a, b in pairwise(found)), "two replays dropped the same pairs"
    print("drawn seeds: other ones in each replay", flush=True)


def main(mode: str) -> None:
    for name, call, given in families():
        check_compiled(name, call, given, mode)
    check_cache(mode)
    check_drawn_seeds(mode)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(256, 768, bias=False), torch.nn.Linear(256, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 64)).unbind(2)
        return x + self.out(flash_attn_func(q, k, v, mask=Causal()).flatten(2))


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(Layer(), Layer()).to("cuda", torch.bfloat16)


def batches() -> list[Tensor]:
    source = torch.Generator("cuda").manual_seed(1)
    return [torch.randn(2, 700, 256, device="cuda", dtype=torch.bfloat16, generator=source) for _ in range(5)]


def trained(step: Callable[[Tensor], object], net: torch.nn.Module) -> list[Tensor]:
    for batch in batches():
        step(batch)
    return [x.detach().clone() for x in net.parameters()]


def plain_steps(net: torch.nn.Module, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        forward(batch).float().square().mean().backward()
        optimizer.step()

    return step


def graphed_callables() -> None:
    """torch.cuda.make_graphed_callables, as the first use of the library."""
    net, other = model(), model()
    graphed: Any = torch.cuda.make_graphed_callables(net, (torch.zeros_like(batches()[0]).requires_grad_(),))
    found = trained(plain_steps(net, lambda x: graphed(x.requires_grad_())), net)
    compare("make_graphed_callables", [found], trained(plain_steps(other, other), other))


def captured_step() -> None:
    """A whole training step in a graph: forward, backward, optimizer."""
    net, other = model(), model()
    place, step = torch.zeros_like(batches()[0]), plain_steps(net, net)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    weights = [x.detach().clone() for x in net.parameters()]
    with torch.cuda.stream(side):
        for _ in range(3):
            step(place)
    torch.cuda.current_stream().wait_stream(side)
    with torch.no_grad():
        for parameter, weight in zip(net.parameters(), weights, strict=True):
            parameter.copy_(weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(place)

    def replayed(batch: Tensor) -> None:
        place.copy_(batch)
        graph.replay()

    compare("captured step", [trained(replayed, net)], trained(plain_steps(other, other), other))
