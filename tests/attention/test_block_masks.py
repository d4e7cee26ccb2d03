"""FlexAttention's BlockMask as a mask of ours: what it attends, block by block, by its own rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, create_mask, flex_attention, noop_mask, or_masks

from dash_attn import BooleanMask, Causal, Documents, Window, explain, flash_attn_func
from dash_attn.masks import from_block_mask
from dense import assert_same_bits, largest_error, random_inputs, run_dense, run_ours

Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
DOCUMENT = torch.repeat_interleave(torch.arange(3), torch.tensor([100, 50, 150]))
TABLE = torch.rand(2, 4, 300, 300, generator=torch.Generator().manual_seed(0)) < 0.1


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q - kv).abs() <= 40


def documents(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return DOCUMENT[q] == DOCUMENT[kv]


def table(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return TABLE[b, h, q, kv]


def strided_by_head(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q - kv) % (h + 2) == 0


def queries_only(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= 130


MODS: list[tuple[Mod, int | None, int | None]] = [
    (causal, None, None),
    (window, None, None),
    (and_masks(causal, documents), None, None),
    (or_masks(window, strided_by_head), None, 4),
    (table, 2, 4),
    (queries_only, 2, None),
    (noop_mask, None, None),
]
NAMES = [getattr(mod, "__name__", "joined") for mod, _, _ in MODS]


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


@pytest.mark.parametrize("block", [128, (64, 32)], ids=str)
@pytest.mark.parametrize(("mod", "batch", "heads"), MODS, ids=NAMES)
def test_it_attends_what_flex_attention_attends(mod: Mod, batch: int | None, heads: int | None, block: Any) -> None:
    inputs = random_inputs(300, 300, (4, 4), 16, torch.float64, batch=2)
    block_mask = create_block_mask(mod, batch, heads, 300, 300, device="cpu", BLOCK_SIZE=block)
    made = from_block_mask(block_mask)
    assert made.numbers.shape == (batch or 1, heads or 1)
    dense = create_mask(mod, batch or 1, heads or 1, 300, 300, device="cpu")
    assert_same_bits(run_ours(inputs, made), run_ours(inputs, dense))
    ours, truth = run_ours(inputs, made), run_dense(inputs, dense, torch.float64)
    assert max(map(largest_error, ours, truth)) < 1e-11
    if block == 128:
        theirs = flex_attention(*map(heads_first, inputs[:3]), block_mask=block_mask)
        assert largest_error(ours.out, heads_first(theirs)) < 1e-11  # also of rows that attend to nothing, which are 0 there, too


@pytest.mark.parametrize(
    ("mod", "mask"),
    [(causal, Causal()), (window, Window(40, 40)), (and_masks(causal, documents), Documents((100, 50, 150)))],
    ids=["causal", "window", "documents"],
)
def test_masks_by_name_are_the_same_tiles(mod: Mod, mask: Any) -> None:
    """The results agree, and so does which tiles are kept: the order may differ, where we know more of a mask by name."""
    inputs = random_inputs(300, 300, (2, 2), 16, torch.float64)
    made = from_block_mask(create_block_mask(mod, None, None, 300, 300, device="cpu"))
    kept = made.pattern.tile_map(300, 300, 64, 128)
    assert (kept == mask.tile_map(300, 300, 64, 128)).all()
    assert max(map(largest_error, run_ours(inputs, made), run_ours(inputs, mask))) < 1e-12
    if isinstance(mask, Causal):
        assert explain(flash_attn_func, *inputs[:3], mask=made).order_hash == explain(flash_attn_func, *inputs[:3], mask=mask).order_hash


def test_more_keys_than_queries() -> None:
    inputs = random_inputs(130, 400, (4, 2), 16, torch.float64, batch=2)
    made = from_block_mask(create_block_mask(strided_by_head, None, 4, 130, 400, device="cpu"))
    truth = run_dense(inputs, create_mask(strided_by_head, 1, 4, 130, 400, device="cpu"), torch.float64)
    assert max(map(largest_error, run_ours(inputs, made), truth)) < 1e-11


def test_listed_blocks_count_not_the_rule_alone() -> None:
    """As in FlexAttention: mask_mod is asked in partial blocks only. A full block is full, and one that is not listed is empty."""
    counts, places = torch.tensor([[[1, 1]]], dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    full_counts, full_places = torch.tensor([[[0, 1]]], dtype=torch.int32), torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    block_mask = BlockMask.from_kv_blocks(counts, places, full_counts, full_places, BLOCK_SIZE=64, mask_mod=window, seq_lengths=(128, 128))
    row = torch.arange(128)
    expected = (row[:, None] - row).abs() <= 40
    expected[:64, 64:] = False  # not listed
    expected[64:, :64] = True  # full
    assert_same_bits(*(run_ours(random_inputs(128, 128), mask) for mask in (from_block_mask(block_mask), expected)))
    without_full = BlockMask.from_kv_blocks(counts, places, BLOCK_SIZE=64, mask_mod=window, seq_lengths=(128, 128))
    expected[64:, :64] = False
    assert_same_bits(*(run_ours(random_inputs(128, 128), mask) for mask in (from_block_mask(without_full), expected)))


def test_whole_blocks_become_a_map_of_blocks() -> None:
    made = from_block_mask(create_block_mask(lambda b, h, q, kv: (q // 128 + kv // 128) % 2 == 0, None, None, 512, 512, device="cpu"))
    assert type(made.pattern).__name__ == "TileMap"
    assert not made.has_partial_blocks


def test_what_is_no_block_mask_raises() -> None:
    for wrong in (torch.ones(4, 4, dtype=torch.bool), causal, None, BooleanMask(torch.ones(4, 4, dtype=torch.bool))):
        with pytest.raises(TypeError, match=r"from_block_mask needs FlexAttention's BlockMask; got .*, which has no mask_mod"):
            from_block_mask(wrong)
    block_mask = create_block_mask(causal, None, None, 300, 300, device="cpu")
    q = random_inputs(300, 300)[0]
    with pytest.raises(TypeError, match=r"BooleanMask, as dash_attn\.masks\.from_block_mask makes of a BlockMask"):
        flash_attn_func(q, q, q, mask=block_mask)  # type: ignore[arg-type]
    block_mask.mask_mod = lambda b, h, q, kv: (q >= kv).float()
    with pytest.raises(TypeError, match=r"mask_mod must answer True or False; got torch.float32"):
        from_block_mask(block_mask)


def test_rows_that_were_sliced_off_raise() -> None:
    """PyTorch's slice keeps the lengths of the whole. The control: a slice of sequences, and one with lengths of its own."""
    whole = create_block_mask(causal, 2, None, 256, 256, device="cpu")
    second = whole[:, :, 1:]
    second.mask_mod = lambda b, h, q, kv: q + 128 >= kv
    with pytest.raises(ValueError, match=r"needs all 2 blocks of the BlockMask's 256 queries; got 1\. If it was sliced along queries"):
        from_block_mask(second)
    one = whole[1:]
    one.mask_mod = causal
    assert from_block_mask(one).shape == (1, 1, 256, 256)
    rows = BlockMask.from_kv_blocks(
        second.kv_num_blocks,
        second.kv_indices,
        second.full_kv_num_blocks,
        second.full_kv_indices,
        mask_mod=second.mask_mod,
        seq_lengths=(128, 256),
    )
    inputs = random_inputs(128, 256, (2, 2), 16, torch.float64, batch=2)
    assert max(map(largest_error, run_ours(inputs, from_block_mask(rows)), run_ours(inputs, Causal()))) < 1e-12
