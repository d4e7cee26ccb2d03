"""Tensor parallelism of transformers: a rank knows which of the model's heads it has, and keeps the whole model's bits."""

from __future__ import annotations

import pytest
from torch import nn

pytest.importorskip("transformers")

from dash_attn.integrations.huggingface import first_kv_head
from processes import Group
from tensor_parallel_workers import RANKS, sharded_llama

GROUP = Group(sharded_llama, RANKS)


@pytest.mark.slow
def test_ranks_of_a_tp_plan_keep_the_bits_of_the_whole_model() -> None:
    ranks = GROUP.found
    assert [rank["head_offset"] for rank in ranks] == [0, 1]
    for rank in ranks:
        assert rank["logits_off"] < 1e-5
        assert rank["same_inputs"] == rank["same"] == [True] * 3
    assert not all(ranks[1]["same_without"])  # the control: head 1 walks the other way


class Rows:
    """A weight of 6 KV heads of 8 rows, as a DTensor that this rank has its part of."""

    def __init__(self, ranks: int, rank: int, rows: int) -> None:
        self.shape, self.local = (48, 32), (rows, 32)
        self.device_mesh = type("Mesh", (), {"shape": (ranks,), "get_coordinate": lambda self: (rank,)})()
        self.placements = (type("Shard", (), {"is_shard": lambda self, dim: dim == 0})(),)

    def to_local(self) -> Rows:
        part = Rows(1, 0, 0)
        part.shape = self.local
        return part


@pytest.mark.parametrize(("ranks", "rank", "kv_heads", "first"), [(2, 1, 3, 3), (3, 2, 2, 4), (6, 5, 1, 5)])
def test_the_first_head_of_a_rank(ranks: int, rank: int, kv_heads: int, first: int) -> None:
    layer = nn.Module()
    assert first_kv_head(layer, 6) == 0
    layer.k_proj = type("Projection", (nn.Module,), {"weight": Rows(ranks, rank, 8 * kv_heads)})()
    assert first_kv_head(layer, kv_heads) == first
