"""Which rows a rank has, without processes."""

from __future__ import annotations

import pytest
import torch

from dash_attn.distributed import Sharding, positions, shard, unshard


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_zigzag_is_that_of_pytorch(ranks: int) -> None:
    balancer = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._load_balancer")
    theirs = balancer._HeadTailLoadBalancer(16 * ranks, ranks, "cpu")._generate_indices(restore=False).flatten()
    zigzag = Sharding.zigzag(16 * ranks, ranks)
    ours = torch.cat([torch.from_numpy(zigzag.rows_of(rank).copy()) for rank in range(ranks)])
    assert torch.equal(ours.long(), theirs.long())


def test_a_process_alone_has_everything() -> None:
    x = torch.arange(24).view(2, 12)
    assert torch.equal(shard(x), x)
    assert torch.equal(unshard(x, sharding="contiguous"), x)
    assert torch.equal(positions(12), torch.arange(12))
