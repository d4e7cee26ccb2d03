"""Bits of boolean masks as the Hopper kernels read them: the kernel that packs them and the forward kernel run on the host."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from boolean_masks import SORTS, draw
from dash_attn import BooleanMask, Causal, TileMap
from dash_attn.backends import import_backend, run
from dash_attn.backends.hopper.calls.explain import _kernels_of_all
from dash_attn.backends.hopper.calls.mask_bits import BitLayout, MaskBits, PartialTiles
from dash_attn.backends.hopper.driver.parameters import MaskParams
from dash_attn.backends.hopper.tiles import BACKWARD_DIMS, CONSUMER_CHOICES, KERNEL_DIMS, backward_tiles, forward_tiles
from dash_attn.call.boolean_masks import take_mask
from dash_attn.call.call import Call, Grads, Modifiers, Saved, with_elements
from dash_attn.call.options import AttentionOptions
from dash_attn.masks import PatternPerHead, TilePattern
from dash_attn.scheduling.problem import Problem
from decode_on_host import Machine, build, hopper_on_host
from dense import dense, largest_error

LAYOUTS = sorted(
    {
        *(BitLayout(64 * c, forward_tiles(dim, c).kv_rows, True) for dim in KERNEL_DIMS for c in CONSUMER_CHOICES[dim]),
        *(BitLayout(backward_tiles(*dims).q_rows, backward_tiles(*dims).kv_rows, False) for dims in BACKWARD_DIMS),
    },
    key=str,
)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = build(tmp_path_factory.mktemp("masks"), "BOOLEAN_MASKS")
    with hopper_on_host(made):
        yield made


def as_threads_hold_them(matrix: NDArray[np.bool_], layout: BitLayout, tile: tuple[int, int]) -> NDArray[np.bool_]:
    """(threads, scores) of a tile, by what a product of warpgroups leaves in registers; written apart from the kernels."""
    q_len, kv_len = matrix.shape
    whole = np.zeros((tile[0] * layout.q_rows + layout.q_rows, tile[1] * layout.kv_rows + layout.kv_rows), dtype=np.bool_)
    whole[:q_len, :kv_len] = matrix[: whole.shape[0], : whole.shape[1]]
    elements = whole[-layout.q_rows :, -layout.kv_rows :]
    rows = elements if layout.forward else elements.T  # of an accumulator
    # Thread 4 r + c of a warp has columns 2 c, 2 c + 1 of every eight, in rows r and r + 8 of the warp's sixteen.
    warps = rows.reshape(-1, 2, 8, rows.shape[1] // 8, 4, 2)  # warp, half, r, eight, c, column
    held: NDArray[np.bool_] = warps.transpose(0, 2, 4, 3, 1, 5).reshape(layout.threads, -1)
    return held


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", [(300, 413), (75, 5)])
def test_bits_are_what_threads_hold(machine: Machine, layout: BitLayout, shape: tuple[int, int]) -> None:
    matrices = np.random.default_rng(0).random((2, *shape)) < 0.5
    matrices[:, :64, :64] = matrices[:, 200:, 350:] = True  # a full block, and one that is, as far as the lengths go
    mask = BooleanMask(np.stack([matrices[0], matrices[1], matrices[0]])[None])
    problem = Problem(TilePattern(mask.matrices[0].blocks), *shape, layout.q_rows, layout.kv_rows, heads=3, batch=2)
    partial = PartialTiles(problem, layout.forward)
    params, bits = MaskParams(), MaskBits(problem, layout.forward, torch.device("cpu"))
    held = bits.give(params, mask)
    numbers = held.numbers.numpy()
    assert numbers[params.head_numbers :].tolist() == [0, partial.count, 0] * 2, "whose matrix begins where"
    for (q_tile, kv_tile), head in ((tile, head) for tile in partial.tiles.tolist() for head in range(3)):
        row, column = (q_tile, kv_tile) if layout.forward else (kv_tile, q_tile)
        number = numbers[row * params.row_tiles + column] + numbers[params.head_numbers + head]
        found = held.memory.view(-1, layout.words)[number].numpy().reshape(layout.threads, -1)
        expected = as_threads_hold_them(matrices[head % 2], layout, (q_tile, kv_tile))
        unpacked = np.unpackbits(found.view(np.uint8), axis=1, bitorder="little")
        assert (unpacked[:, : expected.shape[1]] == expected).all()
        assert unpacked[:, expected.shape[1] :].all(), "more bits than scores: they drop nothing"
    assert bits.give(params, mask) is held, "kept as long as the mask"


def attend(mask: object, lengths: tuple[int, int], dim: int = 128, heads: tuple[int, int] = (2, 1), batch: int = 2) -> tuple[Tensor, ...]:
    """Output and LSE by the kernels on the host, and the tensors."""
    made = torch.Generator().manual_seed(0)
    shapes = (lengths[0], heads[0]), (lengths[1], heads[1]), (lengths[1], heads[1])
    q, k, v = (torch.randn(batch, *shape, dim, generator=made).bfloat16() for shape in shapes)
    pattern, elements = take_mask(mask, q, k)
    options = AttentionOptions(pattern, dim**-0.5)
    with patch.object(run, "backend_for", lambda *_: import_backend("hopper")):
        return *run.forward(Call(q, k, v, options, modifiers=with_elements(None, elements))), q, k, v


def check(mask: Tensor, lengths: tuple[int, int], dim: int = 128, heads: tuple[int, int] = (2, 1), batch: int = 2) -> None:
    out, lse, q, k, v = attend(mask, lengths, dim, heads, batch)
    keep = mask.expand(batch, heads[0], *lengths)
    truth, truth_lse = dense(q.double(), k.double(), v.double(), keep)
    attends = keep.any(-1)
    assert not out.transpose(1, 2)[~attends].any()
    assert (lse[~attends] == -torch.inf).all()
    assert largest_error(out, truth) < 0.02
    assert largest_error(lse[attends], truth_lse[attends]) < 0.01


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_the_forward_reads_them(machine: Machine, dim: int) -> None:
    mask = torch.rand(150, 270, generator=torch.Generator().manual_seed(dim)) < 0.5
    mask[:, 100:140] = mask[7] = False
    mask[64:, 128:256] = True
    check(mask, (150, 270), dim)


@pytest.mark.parametrize("number", [0, 4, 11, *(pytest.param(number, marks=pytest.mark.exhaustive) for number in range(12, 30))])
def test_random_matrices(machine: Machine, number: int) -> None:
    """Per sequence, per head, and one for all."""
    drawn = draw(number)
    check(drawn.mask, drawn.lengths, 64, drawn.heads, drawn.batch)


def test_heads_of_one_pattern_have_their_own_elements(machine: Machine) -> None:
    mask = torch.rand(2, 2, 70, 140, generator=torch.Generator().manual_seed(1)) < 0.5
    assert isinstance(BooleanMask(mask).pattern, TilePattern)
    check(mask, (70, 140), 64)


def test_a_matrix_has_the_bits_of_the_mask_that_it_is(machine: Machine) -> None:
    triangle = torch.ones(200, 260, dtype=torch.bool).tril(60)
    ours, causal = attend(triangle, (200, 260)), attend(Causal(), (200, 260))
    assert all(map(torch.equal, ours, causal))
    blocks = np.random.default_rng(0).random((4, 5)) < 0.6
    as_map = attend(TileMap(blocks, 64, 64), (200, 260))
    matrix = torch.from_numpy(blocks).repeat_interleave(64, 0).repeat_interleave(64, 1)[:200, :260].clone()
    assert all(map(torch.equal, attend(matrix, (200, 260)), as_map))
    finer = attend(TileMap((np.kron(blocks, np.ones((2, 2))) > 0)[:7, :9], 32, 32), (200, 260))  # looked up block by block
    assert all(map(torch.equal, finer, as_map))
    matrix[np.nonzero(matrix.numpy())[0][0]] = False  # the control: a row less
    assert not torch.equal(attend(matrix, (200, 260))[0], as_map[0])


def test_heads_of_other_patterns_have_the_bits_they_have_alone(machine: Machine) -> None:
    source = torch.Generator().manual_seed(2)
    each = torch.stack([sort((100, 150), source) for sort in SORTS[:4]])
    assert isinstance(BooleanMask(each).pattern, PatternPerHead)
    out, lse, *_ = attend(each, (100, 150), 64, (4, 2), batch=1)
    for head in range(4):
        alone = attend(each[head], (100, 150), 64, (4, 2), batch=1)
        assert torch.equal(out[:, :, head], alone[0][:, :, head])
        assert torch.equal(lse[:, head], alone[1][:, head])


def test_what_a_graph_cannot_hold_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    mask = BooleanMask(torch.stack([torch.zeros(70, 140), torch.ones(70, 140)])[None] > 0)
    assert isinstance(mask.pattern, PatternPerHead)
    with FakeTensorMode():
        q, k = (torch.empty(1, length, 2, 64, dtype=torch.bfloat16, device="cuda") for length in (70, 140))
    call = Call(q, k, k, AttentionOptions(mask.pattern, 1.0, backend="hopper"), modifiers=Modifiers(elements=mask))
    with pytest.raises(RuntimeError, match="differ between sequences or heads cannot be captured in a CUDA graph: give one mask for all"):
        run.forward(call)
    with pytest.raises(RuntimeError, match="differ between sequences or heads cannot be captured in a CUDA graph: give one mask for all"):
        run.backward(call, Saved(q, q), Grads(q))


def test_elements_that_differ_cannot_be_captured(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one pattern, so that one launch serves all heads. The control: one matrix for all of them can."""
    drawn = torch.rand(1, 2, 70, 140, generator=torch.Generator().manual_seed(3)) < 0.5
    several, one = BooleanMask(drawn), BooleanMask(drawn[:, :1])
    assert several.pattern == one.pattern
    for mask in (several, one):
        attend(mask, (70, 140), 64)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    attend(one, (70, 140), 64)
    with pytest.raises(RuntimeError, match="differ between sequences or heads cannot be captured in a CUDA graph: give one mask for all"):
        attend(several, (70, 140), 64)


def test_a_pattern_alone_has_no_elements(machine: Machine) -> None:
    pattern = BooleanMask(torch.rand(70, 140) < 0.5).pattern
    with pytest.raises(ValueError, match="the elements come with a call"):
        attend(pattern, (70, 140), 64)


def test_too_many_partial_tiles_raise(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("dash_attn.backends.hopper.calls.mask_bits"), "MOST_NUMBERS", 3)
    with pytest.raises(ValueError, match=r"takes boolean masks of at most 2\^30 partial tiles; got 4 matrices of 2"):
        attend(torch.rand(2, 2, 70, 140) < 0.5, (70, 140), 64)


def test_kernels_of_patterns_that_differ_are_told_apart() -> None:
    """Patterns with and without partial tiles run other kernels of one name."""

    def said(**digests: str) -> Any:
        return SimpleNamespace(kernels=digests, kernel_origins=dict.fromkeys(digests, "compiled"))

    found = _kernels_of_all([said(forward="a", backward="b"), said(forward="c", backward="b"), said(forward="a", backward="d")])
    assert {name: digest for name, (digest, _) in found.items()} == {"forward": "a", "backward": "b", "forward 2": "c", "backward 2": "d"}
