"""Boolean matrices in the suite `masks`: what is drawn, who runs it, what its tiles and its planning cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bench_results import made_up_row
from bench_stand_ins import fake_times
from benchmarks.peers import peers, rule_of
from benchmarks.result_files import planning_costs, tile_rates
from benchmarks.suites import DRAWN, Matrix, choose, planning_ms
from dash_attn.masks import TileMap, TilePattern
from dash_attn.tools.bench.candidates import make_tensors, ours, who_runs
from dash_attn.tools.bench.checks import dropped_keys
from dash_attn.tools.bench.measure import measure
from dash_attn.tools.bench.shape import Shape

CPU = torch.device("cpu")
NAMES = ("blocks:64", "blocks:32", "elements", "tree")


def small(name: str) -> Shape:
    return Shape(name, 512, 1, 2, 2, 16, dtype="float32")


@pytest.mark.parametrize("name", NAMES)
def test_it_is_drawn_once_and_alike(name: str) -> None:
    matrix = Matrix.parse(name)
    assert matrix is not None
    elements = matrix.elements(512, 512)
    assert elements.shape == (512, 512)
    assert (elements == DRAWN[name.partition(":")[0]](np.random.default_rng(0), 512, 512, int(name.partition(":")[2] or 1))).all()
    assert elements.any(1).all(), "each query attends something"
    assert not elements.all()
    assert matrix.mask(512, 512) is small(name).argument is small(name).argument
    assert isinstance(matrix.mask(512, 512).pattern, TileMap if name == "blocks:64" else TilePattern)


def test_what_they_keep() -> None:
    assert Matrix("blocks:64").elements(512, 512).mean() == 0.5
    assert abs(Matrix("elements").elements(512, 512).mean() - 0.5) < 0.01
    tree = Matrix("tree").elements(2048, 2048)
    assert not np.triu(tree, 1).any()
    assert 0.05 < tree.mean() < 0.4
    assert any((tree[row] != tree[row - 1]).sum() > 100 for row in range(1, 2048)), "branches"


def test_other_masks_are_no_matrices() -> None:
    assert not any(isinstance(Shape(text, 512, 1, 2, 2, 16).attended, Matrix) for text in ("causal", "full", "window:64,0"))
    for text in ("blocks", "blocks:0", "trees", "tree:4"):
        with pytest.raises(ValueError, match="unknown mask"):
            Shape(text, 512, 1, 2, 2, 16)


def test_operations_are_those_of_the_tiles() -> None:
    full, blocks = Shape("full", 1024, 1, 2, 2, 64), Shape("blocks:128", 1024, 1, 2, 2, 64)
    assert blocks.operations("forward") == full.operations("forward") / 2
    assert Shape("elements", 1024, 1, 2, 2, 64).operations("backward") == full.operations("backward")


def test_the_suite_has_them_beside_a_full_mask() -> None:
    shapes = choose("masks", masks=("blocks", "elements", "tree"))
    assert {(shape.mask, shape.seqlen) for shape in shapes} == {
        ("blocks:128", 8192),
        ("blocks:128", 16384),
        ("elements", 8192),
        ("tree", 8192),
    }
    full = choose("masks", masks=("full",), head_dims=(128,))
    assert {(shape.seqlen, shape.q_heads) for shape in full} == {(8192, 16), (16384, 16)}


def test_who_runs_them() -> None:
    said = who_runs(small("tree"), [*ours(schedules=False), *peers(with_flex=True)[0]])
    assert "dash-attn" in said["runs"]
    assert "FlexAttention" in said["runs"]
    assert said["cannot"]["PyTorch flash"] == "has no boolean matrices"


@pytest.mark.parametrize("name", NAMES)
def test_ours_is_checked_and_timed(name: str) -> None:
    rows = measure(small(name), ours(schedules=False)[:1], 2, fake_times, CPU)
    assert [row["status"] for row in rows] == ["ok", "ok"], [row["reason"] for row in rows]


def test_another_matrix_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    shape = small("elements")
    other = Matrix("elements", seed=7).mask(512, 512)
    monkeypatch.setattr(Shape, "argument", property(lambda self: other))
    assert {row["status"] for row in measure(shape, ours(schedules=False)[:1], 2, fake_times, CPU)} == {"failed check"}


def test_flex_gets_the_same_rule() -> None:
    shape = small("tree")
    rule = rule_of(shape, CPU)
    assert rule is not None
    none, index = torch.tensor(0), torch.arange(512)
    kept = rule(none, none, index[:, None], index)
    assert torch.equal(~kept, dropped_keys(shape.attended, slice(0, 512), 512, 512, CPU))


def test_what_a_new_mask_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    shape = small("elements")
    costs = planning_ms(Matrix("elements"), make_tensors(shape, CPU)[:4], {"softcap": 0.0})
    assert set(costs) == {"mask", "forward", "backward", "elements"}
    assert costs["mask"] > 0


def test_tables() -> None:
    full, blocks, other = (Shape(mask, 8192, 2, 16, 16, 128) for mask in ("full", "blocks:128", "causal"))
    rows: list[dict[str, Any]] = []
    for shape, speed in ((full, 600.0), (blocks, 570.0), (other, 500.0)):
        for direction in ("forward", "backward"):
            rows.append({**made_up_row(direction, shape, "dash-attn"), "tflops": speed})
    rows[2]["identity"] = {"planning_ms": {"mask": 1.25, "forward": 2.0, "backward": 3.0, "elements": 4.0}}
    header, cells = tile_rates({"rows": rows})
    assert header == ["", "forward", "backward"]
    assert cells == [[str(blocks), "0.95", "0.95"]]
    assert "random blocks of 128 x 128, half of them" in cells[0][0]
    assert planning_costs({"rows": rows})[1] == [[str(blocks), "1.2", "2.0", "3.0", "4.0"]]
