"""Every kind of attention inside CUDA graphs and on two streams at once."""

from __future__ import annotations

import pytest
import torch

from devices import require
from families import NAMES, assert_same, family
from graphs import capture

pytestmark = pytest.mark.gpu

REPLAYS = 5
ROUNDS = 10


@pytest.mark.parametrize("name", NAMES)
def test_cuda_graph(name: str) -> None:
    chosen = family(name, "cuda")
    if name == "varlen":
        require("cuda", "varlen in graphs")
    static = chosen.inputs("cuda")
    graph, captured = capture(lambda: chosen.run(static))
    for replay in range(REPLAYS):
        fresh = chosen.inputs("cuda", seed=replay)
        for old, new in zip(static, fresh, strict=True):
            old.copy_(new)
        for result in captured.values():
            result.fill_(torch.nan)
        graph.replay()
        assert_same(captured, chosen.run(fresh), f"replay {replay}")


@pytest.mark.parametrize("name", NAMES)
def test_two_streams_at_once(name: str) -> None:
    """The family on one stream, plain causal attention on another, nobody waiting for anybody."""
    jobs = [family(name, "cuda"), family("causal", "cuda")]
    inputs = [job.inputs("cuda", seed) for seed, job in enumerate(jobs)]
    expected = [job.run(x) for job, x in zip(jobs, inputs, strict=True)]
    streams = [torch.cuda.Stream() for _ in jobs]
    torch.cuda.synchronize()
    results = []
    for _ in range(ROUNDS):
        for stream, job, x in zip(streams, jobs, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(job.run(x))
    torch.cuda.synchronize()
    for number, result in enumerate(results):
        assert_same(result, expected[number % 2], f"run {number // 2} on stream {number % 2}")
