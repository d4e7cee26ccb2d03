"""What runs on GPUs alone, on a machine without: a CPU's products and norms are probed as if they were a GPU's, under settings that are
none. Products of MKL depend on their number of rows, so there is something to find."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dash_attn import Unsupported, invariance
from dash_attn.formats import PROBES
from dash_attn.invariance import norms, products, record
from dash_attn.invariance.probe import MEMORY, Product, Way, _rows_that_fit, ways
from dash_attn.invariance.record import Record, surroundings
from dense import same_bits
from gpu_settings import OURS, Settings, settings

__all__ = ["settings"]
COUNTS = (1, 2, 3, 7, 15, 16, 17, 33, 100, 299)
K, N = 96, 40


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Record]:
    """The record of one."""
    monkeypatch.setenv("DASH_ATTN_CACHE", str(tmp_path))
    found = Record({**PROBES.mark, "gpu": "a GPU"})
    monkeypatch.setattr("dash_attn.invariance.probe.record_of", lambda device: found)
    monkeypatch.setattr("dash_attn.invariance.probe.MOST", 512)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for module in ("products", "norms", "check"):
        monkeypatch.setattr(sys.modules[f"dash_attn.invariance.{module}"], "on_gpu", lambda x: True)
    ways.clear()
    yield found
    ways.clear()


class Watched:
    """A product that splits K below a number of rows, and what it was called with."""

    def __init__(self, below: int, settings: Settings | None = None, by_place: bool = False) -> None:
        self.below, self.settings, self.by_place = below, settings, by_place
        self.calls: list[tuple[int, bool]] = []
        self.seen: list[dict[str, Any]] = []

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self.calls.append((len(x), all(y.data_ptr() % 64 == 0 for y in (x, weight))))
        self.seen.append(dict(self.settings or {}))
        parts = (x[:, : K // 3], x[:, K // 3 :]), (weight[:, : K // 3], weight[:, K // 3 :])
        split = len(x) < self.below
        out = sum((self.sums(*pair) for pair in zip(*parts, strict=True)), torch.zeros(())) if split else self.sums(x, weight)
        out = out + 1e-3 * torch.arange(len(x))[:, None] if self.by_place else out
        return out.to(x.dtype) if bias is None else out.to(x.dtype) + bias

    @staticmethod
    def sums(x: Tensor, weight: Tensor) -> Tensor:
        """Each row by itself."""
        return (x.float()[:, None] * weight.float()).sum(-1)


def plant(monkeypatch: pytest.MonkeyPatch, product: Watched) -> Watched:
    monkeypatch.setattr(products, "_linear", product)
    return product


def rows_of(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(300, K, generator=torch.Generator().manual_seed(0)).to(dtype)


def differing(compute: Any, x: Tensor) -> list[int]:
    whole = compute(x).detach()
    return [count for count in COUNTS if not same_bits(compute(x[:count]).detach(), whole[:count])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_products_of_this_cpu(dtype: torch.dtype, gpu: Record) -> None:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert differing(lambda x: functional.linear(x, weight), rows_of(dtype)), "the control: MKL chooses by the number of rows"
    with invariance.enable():
        assert differing(lambda x: functional.linear(x, weight), rows_of(dtype)) == []
    (way,) = gpu.verdicts.values()
    assert Way(*way) != Way(512), "two rows are not enough"


@pytest.mark.parametrize(("below", "way"), [(2, Way(512)), (10, Way(512, fewest=16)), (400, Way(512, 32))])
def test_a_planted_product(below: int, way: Way, gpu: Record, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probed and computed under our settings, gradients with respect to rows, too."""
    planted = plant(monkeypatch, Watched(below, settings))
    layer, x = nn.Linear(K, N, dtype=torch.bfloat16), rows_of(torch.bfloat16).requires_grad_()
    before = dict(settings)
    with invariance.enable():
        assert differing(layer, x) == []
        layer(x).sum().backward()
        few = torch.autograd.grad(layer(x[:3]).sum(), x)[0]
    assert settings == before
    assert planted.seen == [OURS] * len(planted.seen)
    assert x.grad is not None
    assert same_bits(few[:3], x.grad[:3])
    assert Way(*gpu.verdicts[f"K {K}, N {N}, bfloat16 with bias"]) == way
    assert f"K {N}, N {K}, bfloat16 transposed" in gpu.verdicts


def test_a_product_that_depends_on_the_place_of_a_row_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, Watched(0, by_place=True))
    with invariance.enable(), pytest.raises(Unsupported, match=rf"a product of K {K}, N {N}, float32.* even in blocks of 32 rows"):
        functional.linear(rows_of(), torch.randn(N, K))


def test_a_backward_outside_raises(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be computed, and probed, with other settings."""
    planted = plant(monkeypatch, Watched(2, settings))
    layer, x = nn.Linear(K, N), rows_of().requires_grad_()
    with invariance.enable():
        out = layer(x)
    with pytest.raises(RuntimeError, match=r"proved products with library cublaslt; found cublas: run the backward inside of enable"):
        out.sum().backward()
    with invariance.enable():
        settings["bf16"] = (True, True)
        with pytest.raises(RuntimeError, match=r"leave torch\.backends\.cuda as it is"):
            layer(x)
    assert OURS in planted.seen


def test_settings_of_before_are_those_of_the_last_time(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    with invariance.enable():
        pass
    settings.update(OURS)
    with invariance.enable(), invariance.enable(), products.SWITCHES.as_before():
        assert settings == OURS, "the user's own"


def test_less_precise_settings_are_probed_by_themselves(gpu: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, Watched(2))
    weight = torch.randn(N, K)
    kept = torch.backends.cuda.matmul.fp32_precision
    try:
        with invariance.enable():
            for precision in ("ieee", "tf32"):
                torch.backends.cuda.matmul.fp32_precision = precision
                functional.linear(rows_of(), weight)
    finally:
        torch.backends.cuda.matmul.fp32_precision = kept
    assert set(gpu.verdicts) == {f"K {K}, N {N}, float32, {precision}" for precision in ("ieee", "tf32")}


def test_weights_that_are_not_aligned_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = plant(monkeypatch, Watched(2))
    flat = torch.randn(1 + N * K)
    with invariance.enable():
        functional.linear(rows_of()[1:], flat[1:].view(N, K))
    assert all(is_aligned for count, is_aligned in planted.calls if count >= 299)


def test_check_tells_of_weights_that_are_not_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, Watched(2))
    layer = nn.Linear(K, N)
    said = "its weight is copied in every call, as it does not lie at a multiple of 256 bytes"
    assert said not in str(invariance.check(layer))
    layer.weight = nn.Parameter(torch.randn(1 + N * K)[1:].view(N, K))
    assert said in str(invariance.check(layer))


def test_results_of_one_row_can_be_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, Watched(2))
    layer = nn.Linear(K, N)
    with invariance.enable():
        out = layer(rows_of()[:1])
        out += 1
        out.sum().backward()


def test_a_graph_is_captured_after_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, Watched(2))
    weight, x = torch.randn(N, K), rows_of()
    with invariance.enable():
        with monkeypatch.context() as capturing:
            capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            for compute in (lambda: functional.linear(x, weight), lambda: x.mean(-1)):
                with pytest.raises(RuntimeError, match="run it once before the graph"):
                    compute()
        expected = functional.linear(x, weight), x.mean(-1)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert all(same_bits(*pair) for pair in zip((functional.linear(x, weight), x.mean(-1)), expected, strict=True))


def test_check_proves_products_of_both_directions(gpu: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, Watched(2))
    report = invariance.check(nn.Sequential(nn.Linear(K, N), nn.LayerNorm(N)))
    assert "proved           Linear: at once, as 2 to 512 rows (0)" in str(report)
    assert set(gpu.verdicts) == {f"K {K}, N {N}, float32 with bias, none", f"K {N}, N {K}, float32 transposed, none"}


@pytest.mark.parametrize("columns", [1024, 2001])
@pytest.mark.parametrize("softmax", [torch.log_softmax, Tensor.softmax, functional.softmax, functional.log_softmax])
def test_rows_of_a_softmax_begin_at_16_bytes(columns: int, softmax: Any) -> None:
    x = torch.randn(3, columns, requires_grad=True)
    expected = softmax(x, dim=-1)
    (wanted,) = torch.autograd.grad(expected[:, 7].sum(), x)
    with invariance.enable():
        found = getattr(torch, softmax.__name__)(x, -1) if softmax is torch.log_softmax else getattr(x, softmax.__name__)(-1)
        assert found.stride(0) % 8 == 0
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found[:, 7].sum(), x)[0], wanted)


@pytest.mark.parametrize("columns", [2000, 2001])
def test_a_softmax_in_another_type_converts_first(columns: int) -> None:
    """Padding is -inf, which no integer is."""
    x = torch.randint(-5, 5, (3, columns))
    expected = x.softmax(-1, dtype=torch.float32)
    with invariance.enable():
        for found in (
            x.softmax(-1, torch.float32),
            functional.softmax(x, -1, dtype=torch.float32),
            torch.softmax(x, 1, dtype=torch.float32),
        ):
            torch.testing.assert_close(found, expected)
        torch.testing.assert_close(x.log_softmax(-1, dtype=torch.float64), expected.double().log())
        assert x.mean(-1, dtype=torch.float32).shape == (3,)
        assert torch.softmax(x.float(), -1, out=(into := torch.empty(3, columns))) is into


@pytest.mark.parametrize("columns", [2000, 2001])
def test_a_softmax_reads_aligned_rows(columns: int) -> None:
    """A GPU takes another kernel where the first row does not begin at 16 bytes."""
    seen = []
    softmax = norms._softmax_of_rows(lambda x, *_, **__: (seen.append(x.data_ptr() % 64), x)[1])
    softmax(torch.randn(1 + 3 * columns)[1:].view(3, columns), -1)
    assert seen == [0]


def test_norms_of_long_rows_are_computed_in_blocks(gpu: Record) -> None:
    def planted(rows: Tensor, dim: int, keepdim: bool) -> Tensor:
        parts = (K // 3, K - K // 3) if len(rows) < 40 and len(rows) != 32 else (K,)
        return sum((part.sum(dim, keepdim) for part in rows.split(parts, -1)), torch.zeros(()))

    planted.__name__ = "sum"
    x = rows_of()
    mean, logsumexp = norms._reduced(planted), norms._reduced(lambda x, *_: planted(x, -1, True).exp(), planted)
    for compute in (mean, logsumexp):
        assert differing(lambda x, compute=compute: compute(x, -1), x) == []
    assert gpu.verdicts == {f"sum of {K} columns, float32": False}


def test_kinds_of_sums(gpu: Record) -> None:
    """A logarithm hides how its sum was rounded: the sum is tried."""
    x = rows_of()
    with invariance.enable():
        found = [x.mean(1), x.logsumexp(-1), functional.normalize(x, dim=-1), functional.normalize(x, p=1, dim=-1)]
    expected = [x.mean(1), x.logsumexp(-1), functional.normalize(x, dim=-1), functional.normalize(x, p=1, dim=-1)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert set(gpu.verdicts) == {f"{kind} of {K} columns, float32" for kind in ("mean", "sum", "linalg_vector_norm")}


def test_rows_that_are_strided_are_copied() -> None:
    x = torch.randn(300, 50).t()
    with invariance.enable():
        assert same_bits(x.mean(-1), x.contiguous().mean(-1))


def test_a_whole_model(gpu: Record) -> None:
    """Forward and backward: all products and norms go the GPU's way."""
    transformers = pytest.importorskip("transformers")
    from dash_attn.integrations import huggingface
    from model_sizes import SMALL

    torch.manual_seed(0)
    with huggingface.enable(), invariance.enable():
        for name in ("Llama", "GPT2", "Phi"):
            config = getattr(transformers, f"{name}Config")(**SMALL, eos_token_id=None, bos_token_id=None, pad_token_id=0)
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="dash_attn").eval()
            tokens = torch.randint(1, 60, (3, 21))
            together = model(input_ids=tokens, use_cache=False).logits
            alone = [model(input_ids=row[None, :length], use_cache=False).logits[0] for row, length in zip(tokens, (1, 9, 21), strict=True)]
            assert all(same_bits(one.detach(), row[: len(one)].detach()) for one, row in zip(alone, together, strict=True))
            together.sum().backward()
    kinds = set(gpu.verdicts)
    assert any("mean of" in kind for kind in kinds)
    assert any("layer_norm of" in kind for kind in kinds)
    assert any("transposed" in kind for kind in kinds)


def test_what_a_record_is_found_by(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="a GPU", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    cuda = torch.device("cuda:0")
    first = surroundings(cuda)
    assert {"gpu", "sms", "driver", "cublas", "torch", "cuda", *record.VARIABLES} <= set(first)
    for variable in record.VARIABLES:
        with monkeypatch.context() as one:
            one.setenv(variable, "another")
            assert Record(surroundings(cuda)).path != Record(first).path
    properties.multi_processor_count = 114
    assert Record(surroundings(cuda)).path != Record(first).path


@pytest.mark.parametrize("shape", [(2048, 2048), (4096, 14336), (32000, 1024), (128256, 4096), (262144, 5376)])
def test_memory_of_a_probe(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, all results, those of the largest call, and a byte per element of their comparison."""
    monkeypatch.setattr("dash_attn.invariance.probe.MOST", 2**14)
    rows = _rows_that_fit(Product(torch.bfloat16, shape, (shape[1], 1), False))
    n, k = shape
    assert rows * (2 * k + (2 + 2 + 1) * n) <= MEMORY
    assert rows % 64 == 0
    assert rows >= 2048
