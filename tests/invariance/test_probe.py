"""The probe finds products that depend on their number of rows, and keeps its verdicts on disk. Without a GPU it tries planted ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dash_attn import Unsupported
from dash_attn.cli import main
from dash_attn.formats import PROBES
from dash_attn.invariance import products, record
from dash_attn.invariance.probe import MOST, Product, Way, Ways, _inputs, norm_in_blocks, proved
from dash_attn.invariance.record import Record, in_words
from dash_attn.invariance.rows import BLOCK, at_least, in_blocks
from dense import same_bits

CPU = torch.device("cpu")
ASKED = Product(torch.bfloat16, (24, 64), (64, 1), False)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DASH_ATTN_CACHE", str(tmp_path))
    monkeypatch.setattr("dash_attn.invariance.probe.MOST", 1024)
    return tmp_path


def found_record(**facts: Any) -> Record:
    return Record({**PROBES.mark, "gpu": "a GPU", **facts})


def in_float32(x: Tensor, weight: Tensor) -> Tensor:
    return in_blocks(lambda rows: functional.linear(rows.float(), weight.float()), x)


def row_by_row(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Every element is a sum in one order, whatever the number of rows."""
    out = in_float32(x, weight).to(x.dtype)
    return out if bias is None else out + bias


class Planted:
    """Splits K where a call has few rows, as cuBLAS does."""

    def __init__(self, below: int, above: int = 0) -> None:
        self.below, self.above, self.sizes = below, above, set[int]()

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self.sizes.add(len(x))
        if not self.above <= len(x) < self.below:
            return row_by_row(x, weight, bias)
        third = x.shape[1] // 3  # not in halves: some CPUs sum so anyway
        first, second = (in_float32(x[:, cut], weight[:, cut]) for cut in (slice(third), slice(third, None)))
        return (first + second).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(24, 64), (24, 65), (1, 8)], ids=str)
def test_a_product_that_keeps_its_bits(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    for stride in ((shape[1], 1), (1, shape[0])):
        asked = Product(dtype, shape, stride, has_bias=True)
        assert proved(row_by_row, asked, CPU, found_record()) == Way(1024)


def test_many_numbers_of_rows_are_tried() -> None:
    multiply = Planted(below=0)
    proved(multiply, ASKED, CPU, found_record())
    assert {*range(2, 34), 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 1023} <= multiply.sizes
    assert 1 not in multiply.sizes, "one row is computed as two"


@pytest.mark.parametrize(("below", "fewest"), [(3, 16), (16, 16), (17, 64), (250, 256)])
def test_a_product_that_splits_k_for_few_rows_is_computed_with_more(below: int, fewest: int) -> None:
    assert proved(Planted(below), ASKED, CPU, found_record()) == Way(1024, fewest=fewest)
    assert proved(Planted(0), ASKED, CPU, found_record()) == Way(1024, fewest=fewest), "from the record"


@pytest.mark.parametrize(("below", "above"), [(258, 0), (513, 512), (258, 257)])
def test_a_product_that_splits_k_is_computed_in_blocks(below: int, above: int) -> None:
    """Also where a single number of rows does. In blocks all calls have one size."""
    assert proved(Planted(below, above), ASKED, CPU, found_record()) == Way(1024, BLOCK)


def test_one_row_alone_may_differ() -> None:
    assert proved(Planted(2), ASKED, CPU, found_record()) == Way(1024)


def test_a_product_that_depends_on_the_place_of_a_row_raises() -> None:
    def by_place(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return row_by_row(x, weight) + 1e-3 * torch.arange(len(x))[:, None].to(x.dtype)

    with pytest.raises(Unsupported, match=r"K 64, N 24, bfloat16 on cpu gives a row other bits .* in blocks of 32 rows"):
        proved(by_place, ASKED, CPU, found_record())


def test_terms_cancel_so_that_rounding_shows() -> None:
    """With plain random numbers a split of two rows is seldom seen after rounding; of these nearly every element differs."""
    x, weight, _ = _inputs(Product(torch.bfloat16, (256, 512), (512, 1), False), 64, CPU)
    split = Planted(10**6)
    assert (split(x, weight) != row_by_row(x, weight)).float().mean() > 0.5
    x, weight = (torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16() for shape in ((64, 512), (256, 512)))
    assert (split(x, weight) != row_by_row(x, weight)).float().mean() < 0.01


def test_verdicts_are_kept_by_surroundings(folder: Path) -> None:
    multiply = Planted(0)
    assert proved(multiply, ASKED, CPU, found_record()) == Way(1024)
    multiply.sizes.clear()
    assert proved(multiply, ASKED, CPU, found_record()) == Way(1024)
    assert not multiply.sizes, "it was on disk"
    proved(multiply, ASKED, CPU, found_record(driver="another"))
    assert multiply.sizes
    assert len(list(folder.glob("invariance-*.json"))) == 2


def test_a_damaged_record_is_made_again(folder: Path) -> None:
    proved(row_by_row, ASKED, CPU, found_record())
    (path,) = folder.glob("invariance-*.json")
    path.write_text("{")
    multiply = Planted(0)
    proved(multiply, ASKED, CPU, found_record())
    assert multiply.sizes
    assert found_record().get(str(ASKED)) == [1024, 0, 2]


def mean(rows: Tensor) -> Tensor:
    return torch.mean(rows, -1, True)


def planted_mean(rows: Tensor) -> Tensor:
    """Of long rows, which a GPU cuts where they are few."""
    return mean(rows if len(rows) > 40 else rows.flip(1))


def test_norms_that_depend_on_their_rows_are_computed_in_blocks() -> None:
    kept = found_record()
    assert not norm_in_blocks("mean", mean, 64, torch.float32, kept, CPU)
    for _ in range(2):  # tried, and from the record
        assert norm_in_blocks("mean", planted_mean, 48, torch.float32, kept, CPU)
    assert kept.verdicts == {"mean of 64 columns, float32": True, "mean of 48 columns, float32": False}


def test_norms_that_depend_on_the_place_of_a_row_raise() -> None:
    def by_place(rows: Tensor) -> Tensor:
        return mean(rows) + torch.arange(len(rows))[:, None]

    with pytest.raises(Unsupported, match="the mean of 48 columns, float32, gives a row other bits at another place on cpu"):
        norm_in_blocks("mean", by_place, 48, torch.float32, found_record(), CPU)


@pytest.mark.parametrize("stride", [(7, 1), (1, 5)])
def test_memory_beside_the_inputs_of_a_probe(stride: tuple[int, int]) -> None:
    """Of the weight, which may fill much of a GPU: its own and at most as much again. Each row still cancels."""
    asked = Product(torch.float32, (5, 7), stride, True)
    x, weight, bias = _inputs(asked, 64, CPU)
    assert weight.stride() == stride
    assert (x.double() @ weight.double().t()).abs().max() < 1e-5
    assert bias is not None
    assert len(x.unique()) > 300


def test_a_call_goes_the_way_that_was_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, by a device that is none."""
    multiply = Planted(200, 100)
    monkeypatch.setattr(products, "_linear", multiply)
    monkeypatch.setattr(products, "ways", ways := Ways())
    monkeypatch.setattr("dash_attn.invariance.probe.record_of", lambda device: found_record())
    x, weight, _ = _inputs(ASKED, 300, CPU)
    for way, sizes in (
        (Way(1024), {2, 150, 300}),
        (Way(1024, fewest=256), {256, 300}),
        (Way(128), {2, 22, 44, 128}),
        (Way(1024, BLOCK), {BLOCK}),
    ):
        monkeypatch.setattr(ways, "of_product", lambda *_, way=way: way)
        multiply.sizes.clear()
        for count in (1, 150, 300):
            assert products._in_proved_way(x[:count], weight, None).shape == (count, 24)
        assert multiply.sizes == sizes
    monkeypatch.undo()
    assert same_bits(at_least(2, x[:1])[1:], x[:1])
    assert MOST == 2**14


def test_the_doctor_tells_what_was_proved(capsys: pytest.CaptureFixture[str]) -> None:
    assert in_words() == "invariance: no product has been probed on a GPU here"
    proved(row_by_row, ASKED, CPU, found_record())
    proved(Planted(300), Product(torch.bfloat16, (24, 128), (128, 1), False), CPU, found_record())
    norm_in_blocks("mean", mean, 64, torch.float32, found_record(), CPU)
    norm_in_blocks("mean", planted_mean, 48, torch.float32, found_record(), CPU)
    main.main(["doctor"])
    said = "invariance on a GPU: 2 kinds of products proved, 1 of them in blocks; 2 kinds of norms proved, 1 of them in blocks"
    assert said in capsys.readouterr().out


def test_the_version_of_the_library_that_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(record, "LIBRARIES", tmp_path / "none")
    assert record.cublas_version() is None
    (tmp_path / "none").write_text("7f00 r-xp /usr/lib/libc.so.6\n")
    assert record.cublas_version() is None
