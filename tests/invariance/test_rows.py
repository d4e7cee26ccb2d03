"""Inside `enable()` a row has the bits it has alone, whatever comes with it; outside it has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dash_attn import Unsupported, invariance
from dash_attn.invariance import products
from dash_attn.invariance.probe import Ways
from dense import same_bits

ROWS = 600
COUNTS = [1, 2, 3, 5, 7, 9, 15, 16, 17, 31, 32, 33, 64, 100, 257, 599]
K, N = 100, 30
Function = Callable[[Tensor], Tensor]


def functions(dtype: torch.dtype) -> dict[str, Function]:
    made = torch.Generator().manual_seed(1)
    weight, bias, scale = (torch.randn(shape, generator=made).to(dtype) for shape in ((N, K), (N,), (K,)))
    turned = weight.t().contiguous()
    return {
        "linear": lambda x: functional.linear(x, weight),
        "linear with bias": lambda x: functional.linear(x, weight, bias),
        "matmul": lambda x: torch.matmul(x, turned),
        "at": lambda x: x @ turned,
        "mm": lambda x: x.mm(turned),
        "mm into": lambda x: torch.mm(x, turned, out=x.new_empty(len(x), N)),
        "addmm": lambda x: torch.addmm(bias, x, turned),
        "addmm of a bias": lambda x: bias.addmm(x, turned),
        "addmm of a matrix": lambda x: torch.addmm(x[:, :N], x, turned, beta=0.5, alpha=2),
        "few columns": lambda x: functional.linear(x, turned[:, :7].t()),
        "an odd number of columns": lambda x: functional.linear(x[:, :99], weight[:11, :99], bias[:11]),
        "with a vector": lambda x: x @ scale,
        "mv": lambda x: torch.mv(x, vec=scale),
        "linear with a vector": lambda x: functional.linear(x[None], scale, bias[0])[0],
        "mean": lambda x: x.float().pow(2).mean(-1, keepdim=True),
        "mean of a long row": lambda x: x[:, :1].float().expand(-1, 40_000).mul(torch.arange(40_000) + 0.1).mean(dim=-1),
        "mean into a type": lambda x: x.mean((1,), dtype=torch.float64),
        "logsumexp": lambda x: x[:, :1].float().expand(-1, 40_000).mul(torch.arange(40_000) * 1e-4).logsumexp(1),
        "normalize": lambda x: functional.normalize(x[:, :1].float().expand(-1, 40_000) + torch.arange(40_000), dim=-1),
        "layer_norm": lambda x: functional.layer_norm(x, (K,), scale),
        "rms_norm": lambda x: functional.rms_norm(x, (K,), scale),
        "silu": lambda x: functional.silu(x),
        "gelu": lambda x: functional.gelu(x, approximate="tanh"),
        "sigmoid": lambda x: torch.sigmoid(x),
        "rsqrt": lambda x: x.abs().rsqrt(),
        "exp2": lambda x: x.exp2(),
        "celu": lambda x: functional.celu(x),
        "softplus": lambda x: functional.softplus(x),
        "log_softmax": lambda x: x.float().log_softmax(-1),
        "rotary tables": lambda x: torch.cat([x.float().cos(), x.float().sin()], -1),
        "sum of squares": lambda x: x.float().pow(2).sum(-1, keepdim=True),
    }


FUNCTIONS = list(functions(torch.float32))


def rows_of(dtype: torch.dtype) -> Tensor:
    return torch.randn(ROWS, K, generator=torch.Generator().manual_seed(0)).to(dtype)


def differing(compute: Function, x: Tensor) -> list[int]:
    """Numbers of rows with which some row has other bits than among all."""
    whole = compute(x)
    return [n for n in COUNTS for start in (0, 1) if not same_bits(compute(x[start : start + n]), whole[start : start + n])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_number_of_rows(name: str, dtype: torch.dtype) -> None:
    compute, x = functions(dtype)[name], rows_of(dtype)
    outside = compute(x)
    with invariance.enable():
        assert differing(compute, x) == []
        # The product is rounded before the matrix is added, as in x @ y + z, which shows in 16 bits.
        twice = name == "addmm of a matrix" and dtype.itemsize == 2
        roundings = {"atol": 2 * torch.finfo(dtype).eps * float(outside.abs().max()), "rtol": 0.0} if twice else {}
        torch.testing.assert_close(compute(x), outside, **roundings)


@pytest.mark.parametrize("name", ["linear", "silu", "gelu", "sigmoid"])
def test_outside_rows_depend_on_others(name: str) -> None:
    """The control. In float32 PyTorch's libraries choose by size."""
    assert differing(functions(torch.float32)[name], rows_of(torch.float32))


@pytest.mark.parametrize("view", [lambda x: x[:, ::2], lambda x: x.reshape(-1)[1:-99].view(-1, 50), lambda x: x.t()[:50].t()], ids=range(3))
def test_where_rows_lie_does_not_matter(view: Callable[[Tensor], Tensor]) -> None:
    x, weight = view(rows_of(torch.float32)), torch.randn(8, 50)
    with invariance.enable():
        assert same_bits(functional.linear(x, weight), functional.linear(x.clone().contiguous(), weight))


def test_gradients_are_those_of_pytorch_and_of_rows_their_own() -> None:
    x, layer = rows_of(torch.float64).requires_grad_(), nn.Linear(K, N, dtype=torch.float64)
    upstream = torch.randn(ROWS, N, dtype=torch.float64)
    expected = torch.autograd.grad(layer(x), [x, *layer.parameters()], upstream)
    with invariance.enable():
        found = torch.autograd.grad(layer(x), [x, *layer.parameters()], upstream)
        (few,) = torch.autograd.grad(layer(x[:3]), x, upstream[:3])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert same_bits(few[:3], found[0][:3])


def test_only_gradients_that_are_asked_for() -> None:
    x, layer = rows_of(torch.float32), nn.Linear(K, N)
    layer.bias.requires_grad_(False)
    with invariance.enable():
        layer(x).sum().backward()
        assert layer.weight.grad is not None
        assert layer.bias.grad is None
        assert not layer(x.requires_grad_()).detach().requires_grad
        (grad,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(grad, layer.weight.sum(0).expand_as(x))


def test_autocast_casts_as_pytorch_does() -> None:
    x, layer = rows_of(torch.float32), nn.Linear(K, N)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
        with invariance.enable():
            found = layer(x)
            assert differing(layer, x) == []
            found.sum().backward()
    assert found.dtype == torch.bfloat16
    assert layer.weight.grad is not None
    torch.testing.assert_close(found, expected)
    with torch.autocast("cpu", torch.bfloat16), invariance.enable():
        assert layer.double()(x.double()).dtype == torch.float64, "which PyTorch does not cast"


def others(x: Tensor) -> list[Tensor]:
    row = x[0, 0]
    return [
        x @ x.mT,
        x.mean(),
        x.mean(1),
        x.mean((0, 2)),
        row @ row,
        torch.linalg.vector_norm(x),
        x.logsumexp(0),
        x.int().mean(-1, dtype=x.dtype),
    ]


def test_shapes_that_are_no_rows_go_to_pytorch() -> None:
    x = torch.randn(2, 3, 4)
    expected = others(x)
    with invariance.enable():
        found = others(x)
        empty = functional.linear(x[:0], torch.randn(5, 4))
        assert x.mean(axis=-1).shape == (2, 3)
        assert torch.equal(torch.mm(x[0].to_sparse(), x[0].t()), torch.mm(x[0].to_sparse(), x[0].t().clone()))
    assert empty.shape == (0, 3, 5)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_row_alone() -> None:
    x, layer = rows_of(torch.float32), nn.Linear(K, N, bias=False)
    with invariance.enable():
        whole = layer(x)
        assert all(same_bits(one.detach(), whole[3].detach()) for one in (layer(x[3]), x[3] @ layer.weight.t()))


@pytest.mark.parametrize("count", [1, 40])
def test_results_can_be_changed_in_place(count: int) -> None:
    """As models do that add embeddings."""
    x, layer = rows_of(torch.float32)[:count, :96], nn.Linear(96, 48)
    (expected,) = torch.autograd.grad(layer(x).exp().sum(), layer.weight)
    with invariance.enable():
        out = layer(x)
        out += 1
        (found,) = torch.autograd.grad((out - 1).exp().sum(), layer.weight)
    torch.testing.assert_close(found, expected)


def test_results_go_where_they_are_asked_to() -> None:
    x = rows_of(torch.float32)
    with invariance.enable():
        for compute in (
            torch.sigmoid,
            lambda x, out: torch.mean(x, -1, True, out=out),
            lambda x, out: torch.addmm(x[:, :N], x, x[:K, :N], out=out),
        ):
            expected: Tensor = compute(x, out=None)
            out = torch.empty_like(expected)
            assert compute(x, out=out) is out
            assert same_bits(out, expected)
        for compute in (functional.silu, functional.selu, lambda x, inplace: functional.elu(x, 0.5, inplace)):
            changed = x.clone()
            assert compute(changed, inplace=True) is changed
            assert same_bits(changed, compute(x, inplace=False))


def test_a_weight_without_memory_of_its_own() -> None:
    x = rows_of(torch.float32)
    with invariance.enable():
        found = x @ x.new_ones(1).expand(K, N)
        assert functional.linear(x, x.new_empty(0, K)).shape == (ROWS, 0)
    torch.testing.assert_close(found, x.sum(1, keepdim=True).expand(-1, N))


def test_a_product_that_depends_on_the_place_of_a_row_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are tried on a CPU, too."""
    monkeypatch.setattr(products, "ways", Ways())
    monkeypatch.setattr(products, "_linear", lambda x, weight, bias: (x[:, None] * weight).sum(-1) + torch.arange(len(x))[:, None])
    with invariance.enable(), pytest.raises(Unsupported, match=r"a product of K 112, N 32, float32.* on cpu gives a row other bits"):
        functional.linear(rows_of(torch.float32), torch.randn(N, K))


def test_tensors_without_elements_are_not_probed() -> None:
    x = torch.randn(2, 3, 2001, device="meta")
    with invariance.enable():
        assert functional.linear(x, x.new_empty(5, 2001)).shape == (2, 3, 5)
        assert x.mean(-1).shape == (2, 3)
        assert functional.layer_norm(x, (2001,)).shape == x.softmax(-1).shape == x.shape


def test_other_kinds_of_tensors_are_refused() -> None:
    class Other(Tensor):
        pass

    with invariance.enable(), pytest.raises(Unsupported, match="takes plain tensors; got a product of Other and Tensor"):
        functional.linear(torch.randn(2, 4).as_subclass(Other), torch.randn(3, 4))


def test_compiled_programs_run_eagerly() -> None:
    calls: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(nn.Linear(K, N), backend=backend)
    with invariance.enable():
        assert differing(compiled, rows_of(torch.float32)) == []
    assert not calls
    compiled(rows_of(torch.float32))
    assert calls, "afterwards they are compiled again"
