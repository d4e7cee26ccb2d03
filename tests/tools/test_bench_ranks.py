"""The suite `ranks`: unequal lengths, narrow values and shared KV heads at a small size on the CPU; who runs them; tables and pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench_results import made_up_results, made_up_row
from bench_stand_ins import fake_times, spoiled
from benchmarks import peers as all_peers
from benchmarks import pictures
from benchmarks.peers import Package, equal_heads, peers
from benchmarks.result_files import case_names
from benchmarks.suite import main
from benchmarks.suites import SUITES, choose
from dash_attn import flash_attn_func
from dash_attn.tools.bench import pytorch_peers
from dash_attn.tools.bench.candidates import EQUAL_HEADS, Candidate, Runner, Tensors, make_tensors, ours, runner, who_runs
from dash_attn.tools.bench.checks import Reference, distance, dropped_keys
from dash_attn.tools.bench.measure import measure
from dash_attn.tools.bench.report import save, summary, table
from dash_attn.tools.bench.shape import Shape
from dense import dense as whole_dense
from dense import element_mask
from picture_texts import overlaps

CPU = torch.device("cpu")
SMALL = {
    "few KV heads": Shape("causal", 300, 2, 6, 2, 32),
    "narrow values": Shape("causal", 300, 2, 2, 2, 48, v_head_dim=32),
    "short causal queries": Shape("causal", 300, 2, 4, 2, 32, q_seqlen=70),
    "short full queries": Shape("full", 300, 1, 2, 2, 32, q_seqlen=70),
    "short queries, narrow values": Shape("causal", 300, 1, 4, 1, 48, q_seqlen=130, v_head_dim=32),
}
each_kind = pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)


def test_the_suite_has_the_shapes_of_ranks() -> None:
    shapes = SUITES["ranks"].shapes()
    heads = {(s.q_heads, s.kv_heads) for s in shapes if s.group > 1}
    assert heads == {(8, 1), (16, 1), (4, 1), (64, 8), (28, 4), (32, 8), (71, 1), (8, 4)}
    assert {(s.head_dim, s.v_head_dim) for s in shapes} == {(128, 128), (192, 128), (256, 256), (80, 80), (64, 64)}
    assert {(s.q_seqlen, s.seqlen) for s in shapes if s.shift} == {(1024, 8192), (2048, 16384), (4096, 32768), (512, 8192)}
    assert [s.mask for s in shapes if s.lengths] == ["full"]
    assert len({str(s) for s in shapes}) == len(shapes) == 23
    assert len(choose("ranks", head_dims=(192,))) == 2


@each_kind
def test_shapes_survive_json(shape: Shape) -> None:
    assert Shape.from_json(json.loads(json.dumps(shape.to_json()))) == shape


def test_what_is_as_usual_is_not_named() -> None:
    shape = Shape("causal", 300, 1, 2, 2, 32)
    assert (shape.q_seqlen, shape.v_head_dim, shape.shift) == (300, 32, 0)
    assert not {"q_seqlen", "v_head_dim"} & set(shape.to_json())
    assert Shape("causal", 300, 1, 2, 2, 32, q_seqlen=300, v_head_dim=32) == shape
    assert str(SMALL["short queries, narrow values"]) == (
        "causal, head dim 48 (values 32), 4 query and 1 KV heads, 1 x 130 queries on 300 keys"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_seqlen": 301}, "more queries than keys"),
        ({"q_seqlen": -1}, "q_seqlen"),
        ({"v_head_dim": -1}, "v_head_dim"),
        ({"q_seqlen": 100, "lengths": (100, 200)}, "as many queries as keys"),
    ],
)
def test_shapes_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shape(**{"mask": "causal", "seqlen": 300, "batch": 1, "q_heads": 2, "kv_heads": 2, "head_dim": 32, **changes})


@pytest.mark.parametrize("bad", [{"q_seqlen": 0}, {"v_head_dim": "wide"}])
def test_damaged_json_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Shape.from_json({**SMALL["few KV heads"].to_json(), **bad})


@each_kind
def test_operations_count_the_pairs_and_both_widths(shape: Shape) -> None:
    pairs = int(element_mask(shape.attended, shape.q_seqlen, shape.seqlen).sum()) * shape.batch * shape.q_heads
    assert shape.operations("forward") == pytest.approx(2 * pairs * (shape.head_dim + shape.v_head_dim), rel=0.02)
    assert shape.operations("backward") == pytest.approx(2 * pairs * (3 * shape.head_dim + 2 * shape.v_head_dim), rel=0.02)


@each_kind
def test_keys_are_dropped_as_the_mask_says(shape: Shape) -> None:
    rows = slice(11, shape.q_seqlen - 3)
    dropped = dropped_keys(shape.attended, rows, shape.q_seqlen, shape.seqlen, CPU)
    assert torch.equal(~dropped, element_mask(shape.attended, shape.q_seqlen, shape.seqlen)[rows])


def whole(tensors: Tensors, shape: Shape) -> dict[str, Tensor]:
    """Attention and gradients by the tests' own definition."""
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    out, _ = whole_dense(*leaves, shape.attended)
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, tensors.dout), strict=True))}


@each_kind
def test_the_reference_is_attention(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dash_attn.tools.bench.checks.BLOCK", 64)  # several blocks of rows, the last one short
    tensors = Tensors(*(x.double() for x in make_tensors(shape, CPU)[:4]))
    assert tensors.dout.shape == (shape.batch, shape.q_seqlen, shape.q_heads, shape.v_head_dim)
    expected, found = whole(tensors, shape), Reference(shape, tensors)
    for name, result in expected.items():
        assert distance(found.exact[name], found._part(name, result)) < 1e-6, name


@each_kind
def test_ours_runs_and_equal_heads_where_they_are_shared(shape: Shape) -> None:
    candidates = [*ours(schedules=False), equal_heads()]
    rows = {(row["candidate"], row["pass"]): row for row in measure(shape, candidates, 2, fake_times, CPU)}
    assert {row["status"] for row in rows.values()} == {"ok"}, [row["reason"] for row in rows.values()]
    mine = rows["dash-attn", "backward"]
    assert mine["ratio_to_unordered"] == 1.0
    assert ((EQUAL_HEADS, "backward") in rows) == ("ratio_to_equal_heads" in mine) == (shape.group > 1)
    assert (EQUAL_HEADS, "forward") not in rows
    assert summary({"suite": "ranks", "rows": list(rows.values())}, Path("x"))["failed"] == 0


def test_equal_heads_run_with_a_kv_head_per_query_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed has no sum over a group; what is checked has."""
    heads: list[tuple[int, int]] = []

    def noted(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Any:
        heads.append((q.shape[2], k.shape[2]))
        return flash_attn_func(q, k, v, **rest)

    monkeypatch.setattr("dash_attn.tools.bench.candidates.flash_attn_func", noted)
    shape = SMALL["few KV heads"]
    tensors = make_tensors(shape, CPU)
    made = equal_heads().prepare(shape, tensors)
    assert heads == [(6, 6)]
    assert [x.shape[2] for x in made.backward()] == [6, 6, 6]
    dq, dk, dv = made.results("backward")
    assert (dq.shape, dk.shape, dv.shape) == (tensors.q.shape, tensors.k.shape, tensors.v.shape)
    reference = Reference(shape, tensors)
    assert reference.complaint("backward", (dq, dk, dv)) is None
    assert str(reference.complaint("backward", (dq, dk.flip(2), dv))).startswith("dk is off"), "the control: heads swapped"


def test_equal_heads_only_where_the_suite_asks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ranks", "--list", "--no-peers"]) == 0
    said = capsys.readouterr().out
    assert said.count(f"can run it: dash-attn, dash-attn unordered, {EQUAL_HEADS}\n") == sum(s.group > 1 for s in choose("ranks"))
    assert f"cannot: {EQUAL_HEADS} (its heads are equal already: see dash-attn)" in said
    assert main(["llama", "--list", "--no-peers"]) == 0
    assert EQUAL_HEADS not in capsys.readouterr().out


def test_passes_are_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ranks", "--list", "--no-peers", "--passes", "forward"]) == 0
    assert "can run it: dash-attn\n" in capsys.readouterr().out
    assert main(["--passes", "sideways", "--list"]) == 2
    assert "--passes takes forward and backward; got sideways" in capsys.readouterr().err


def test_who_cannot_align_the_last_query_says_so() -> None:
    candidates = peers(with_flex=True)[0]
    short = who_runs(SMALL["short causal queries"], candidates)
    assert short["cannot"]["cuDNN"] == "scaled_dot_product_attention aligns the first query with the first key"
    assert {"cuDNN with a mask tensor", "PyTorch flash", "FlexAttention"} <= set(short["runs"])
    assert "cuDNN" in who_runs(SMALL["short full queries"], candidates)["runs"]
    narrow = who_runs(SMALL["narrow values"], candidates)
    assert narrow["cannot"]["PyTorch flash"] == "takes only values as wide as keys"
    assert "cuDNN" in narrow["runs"]


@pytest.mark.parametrize("kind", ["short causal queries", "short full queries", "narrow values", "short queries, narrow values"])
def test_sdpa_gets_the_mask_of_short_queries(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN needs a GPU; PyTorch's plain attention takes the same arguments."""
    sdpa = pytorch_peers.sdpa
    monkeypatch.setattr(pytorch_peers, "sdpa", lambda backend, shape, **mask: sdpa("MATH", shape, **mask))
    cudnn = [c for c in all_peers.pytorch_peers() if c.name.startswith("cuDNN")]
    rows = measure(SMALL[kind], cudnn, 2, fake_times, CPU)
    assert [row["status"] for row in rows] == ["ok", "ok"], [row["reason"] for row in rows]


def test_sdpa_itself_would_be_wrong() -> None:
    """The control: what cuDNN refuses for is so, and the check sees it."""
    from torch.nn.functional import scaled_dot_product_attention

    def prepare(shape: Shape, tensors: Tensors) -> Runner:
        return runner(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), tensors, heads_first=True)

    rows = measure(SMALL["short causal queries"], [Candidate("sdpa", prepare)], 2, fake_times, CPU)
    assert [row["status"] for row in rows] == ["failed check"] * 2


def test_the_operator_gets_both_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, ...]] = []

    def operator(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **window: Any) -> tuple[Tensor]:
        given.append(rest)
        return (flash_attn_func(q, k, v, causal=rest[5]),)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", operator)
    flash = next(c for c in all_peers.pytorch_peers() if c.name == pytorch_peers.FLASH)
    rows = measure(SMALL["short causal queries"], [flash], 2, fake_times, CPU)
    assert [row["status"] for row in rows] == ["ok", "ok"], [row["reason"] for row in rows]
    assert given[0] == (None, None, 70, 300, 0.0, True, False)


@each_kind
def test_packages_take_them(shape: Shape) -> None:
    """Their causal masks are aligned at the last query."""

    def function(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, deterministic: bool = False) -> Tensor:
        return flash_attn_func(q, k, v, causal=causal)

    rows = measure(shape, [Package(function, None).candidate("package", True)], 2, fake_times, CPU)
    assert [row["status"] for row in rows] == ["ok"], [row["reason"] for row in rows]


@pytest.mark.parametrize("kind", ["short causal queries", "short full queries", "narrow values"])
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_computes_what_is_timed(kind: str) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    shape, tensors = SMALL[kind], make_tensors(SMALL[kind], CPU)
    attention = all_peers.attention_of(shape, CPU, flex_attention)
    out = attention(*(x.transpose(1, 2).float() for x in tensors[:3])).transpose(1, 2)
    assert Reference(shape, tensors).complaint("forward", (out,)) is None


def results_of_ranks() -> dict[str, Any]:
    rows = []
    for shape in choose("ranks"):
        for name in ("dash-attn", "dash-attn unordered", "cuDNN"):
            row = made_up_row("backward", shape, name)
            rows.append({**row, "ratio_to_fastest_peer": row["ratio_to_cudnn"]})
        if shape.group > 1:
            rows.append({**rows[-3], "candidate": EQUAL_HEADS, "ratio_to_fastest_peer": 1.2})
    return {**made_up_results(), "suite": "ranks", "rows": rows}


def test_no_two_cases_share_a_cell(capsys: pytest.CaptureFixture[str]) -> None:
    """One KV head of 4096 tokens is there with a batch of 1 and of 4."""
    rows = results_of_ranks()["rows"]
    few = [row for row in rows if (row["shape"]["q_heads"], row["shape"]["kv_heads"]) == (8, 1)]
    header, cells = table(few)
    assert header == ["", "1 x 4096", "8192", "16384", "4 x 4096"]
    assert all(len(line) == 5 for line in cells)
    llama = [row for row in rows if (row["shape"]["q_heads"], row["shape"]["kv_heads"]) == (32, 8)]
    assert table(llama)[0] == ["", "16384", "2048 on 16384", "4096 on 32768"]


def test_a_picture_of_the_ranks(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import rc_context

    from dash_attn.tools.calibrate.pictures import STYLE

    results, source, path = results_of_ranks(), tmp_path / "ranks.json", tmp_path / "ranks.svg"
    save(results, source)
    assert main(["--from", str(source), "--plot", str(path)]) == 0
    svg = path.read_text()
    for text in ("at shapes of ranks", EQUAL_HEADS, "2048 queries on 16384 keys", "4 x 4096 tokens"):
        assert text in svg
    with rc_context(STYLE):
        figure = pictures.cases_figure(results, results["rows"], "backward")
        assert overlaps(figure) == []
    drawn = {points.get_label(): points.get_offsets() for points in figure.axes[0].collections}
    assert drawn["dash-attn"][:, 1].tolist() == list(range(23)), "a row for every case"
    assert len(drawn[EQUAL_HEADS]) == sum(s.group > 1 for s in choose("ranks"))


def test_cases_have_short_names_where_those_tell_them_apart() -> None:
    masks = case_names([made_up_row("backward", shape, "dash-attn") for shape in choose("masks")])
    several = {("full", 128), ("blocks:128", 128)}  # of two lengths
    assert all(name == (str(shape) if (shape.mask, shape.head_dim) in several else shape.kind) for shape, name in masks.items())
    assert len(set(masks.values())) == len(masks)
    ranks = case_names(results_of_ranks()["rows"])
    assert len(set(ranks.values())) == 23
    assert all(("queries on" in name) == bool(shape.shift) for shape, name in ranks.items())


def test_spoiled_equal_heads_get_no_figure() -> None:
    bad = Candidate(EQUAL_HEADS, spoiled(lambda dq, dk, dv: (dq, dk * 2, dv)), True, ("backward",))
    rows = {row["candidate"]: row for row in measure(SMALL["few KV heads"], [*ours(False), bad], 2, fake_times, CPU)}
    assert rows[EQUAL_HEADS]["status"] == "failed check"
    assert "ratio_to_equal_heads" not in rows["dash-attn"]
