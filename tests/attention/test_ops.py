"""The torch operators: what opcheck demands, and compiled models with the bits of eager ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.optests.generate_tests import OpCheckError

from dash_attn import Causal, Documents, Full, Mask, Prefix, TileMap, Window, flash_attn_func, flash_attn_varlen_func
from dash_attn.attention.torch_ops import VERSION, Arguments
from dash_attn.call.call import Call
from dash_attn.integrations.sdpa import scaled_dot_product_attention
from dash_attn.libraries import numbers
from dash_attn.masks.encoding import decode_mask, encode_mask
from dash_attn.nn import SelfAttention
from dense import random_inputs, same_bits

BLOCKS = np.random.default_rng(3).random((3, 7)) < 0.5
MASKS: list[Mask] = [
    Full(),
    Causal(),
    Window(3, 40),
    Window(-1, 7),
    Documents((30, 1, 119)),
    Documents((75, 75), causal=False),
    Prefix(20),
    TileMap(BLOCKS, 50, 22),
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], counter: CompileCounterWithBackend | None = None) -> Callable[..., Any]:
    return torch.compile(function, backend=counter or "aot_eager", fullgraph=True)


def gradients(function: Callable[..., Tensor], leaves: list[Tensor], *rest: Any, **options: Any) -> list[Tensor]:
    """The result and the gradients of the sum of its squares."""
    result = function(*leaves, *rest, **options)
    return [result.detach(), *torch.autograd.grad(result.square().sum(), leaves)]


def assert_equal_bits(ours: list[Tensor], expected: list[Tensor]) -> None:
    assert len(ours) == len(expected)
    for i, (one, other) in enumerate(zip(ours, expected, strict=True)):
        assert same_bits(one, other), f"tensor {i} differs"


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_masks_survive_their_code(mask: Mask) -> None:
    assert decode_mask(*encode_mask(mask)) == mask


def test_codes_that_are_no_mask() -> None:
    for name, sizes in (("band", []), ("causal", [1]), ("window", [1]), ("tiles:ff", [2, 4])):
        with pytest.raises(ValueError, match=r"unknown mask .* with sizes"):
            decode_mask(name, sizes)
    with pytest.raises(ValueError, match="a tile map of 3 x 7 blocks needs 3 bytes; got 1"):
        decode_mask("tiles:ff", [3, 7, 50, 22])
    with pytest.raises(TypeError, match="mask must be a dash_attn mask"):
        encode_mask("causal")  # type: ignore[arg-type]


def test_arguments_are_those_of_the_schema() -> None:
    """They are read by name, but an operator passes them by position."""
    for operator, tensors in ((torch.ops.dash_attn.attention, 4), (torch.ops.dash_attn.attention_backward, 8)):
        names = [argument.name for argument in operator.default._schema.arguments]
        assert tuple(names[tensors:]) == Arguments._fields


CHOICES = (0.25, 0.0, "auto", "ordered", "auto", 0, 0.0, VERSION)


def leaves_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=source, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def dense_arguments(mask: Mask, sinks: bool, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    q, k, v, sink = leaves_of((2, 150, 4, 8), (2, 150, 2, 8), (2, 150, 2, 6), (4,), dtype=dtype)
    return q, k, v, sink if sinks else None, None, None, None, None, None, 0, 0, *encode_mask(mask), *CHOICES


def packed_arguments(sinks: bool) -> tuple[Any, ...]:
    q, k, v, sink = leaves_of((90, 4, 8), (90, 2, 8), (90, 2, 8), (4,))
    cu = torch.tensor([0, 30, 30, 90], dtype=torch.int32)
    return q, k, v, sink if sinks else None, cu, cu.clone(), None, None, None, 60, 60, "causal", [], *CHOICES


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("mask", [Causal(), Window(3, 40), TileMap(BLOCKS, 50, 22)], ids=str)
def test_opcheck_of_dense_calls(mask: Mask, sinks: bool) -> None:
    torch.library.opcheck(torch.ops.dash_attn.attention.default, dense_arguments(mask, sinks))


@pytest.mark.parametrize("sinks", [False, True])
def test_opcheck_of_packed_calls(sinks: bool) -> None:
    torch.library.opcheck(torch.ops.dash_attn.attention.default, packed_arguments(sinks))


@pytest.mark.parametrize("arguments", [dense_arguments(Causal(), True, torch.bfloat16), packed_arguments(False)], ids=["dense", "packed"])
def test_opcheck_of_the_backward(arguments: tuple[Any, ...]) -> None:
    out, lse = torch.ops.dash_attn.attention(*arguments)
    detached = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    for dlse in (None, torch.ones_like(lse)):
        gradients = torch.ones_like(out), dlse
        torch.library.opcheck(torch.ops.dash_attn.attention_backward.default, (*gradients, out.detach(), lse.detach(), *detached))


def test_opcheck_finds_a_wrong_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a result that is laid out otherwise than the trace was told."""
    if numbers(torch.__version__) < (2, 13):
        pytest.skip("PyTorch's opcheck does not look at strides before 2.13")

    def transposed(call: Call) -> tuple[Tensor, Tensor]:
        return call.q.new_zeros(2, 4, 150, 6).transpose(1, 2), call.q.new_zeros(2, 4, 150)

    monkeypatch.setattr("dash_attn.attention.known.KnownCall.run_new", staticmethod(transposed))
    with pytest.raises(OpCheckError, match="Stride"):
        torch.library.opcheck(torch.ops.dash_attn.attention.default, dense_arguments(Causal(), False), test_utils="test_faketensor")


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_bits_are_eager_bits_for_every_mask(mask: Mask, dtype: torch.dtype) -> None:
    leaves = leaves_of((2, 150, 4, 16), (2, 150, 2, 16), (2, 150, 2, 16), dtype=dtype)
    options = {"mask": mask, "softcap": 3.0}
    assert_equal_bits(gradients(compiled(flash_attn_func), leaves, **options), gradients(flash_attn_func, leaves, **options))


def test_every_choice_reaches_the_operator() -> None:
    """Each choice changes the bits in eager, and the compiled call has the bits of the same choice."""
    leaves = leaves_of((1, 700, 2, 16), (1, 700, 2, 16), (1, 700, 2, 16), (2,), dtype=torch.float32)

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, **options: Any) -> Tensor:
        return flash_attn_func(q, k, v, sinks=sinks, causal=True, **options)

    plain = gradients(call, leaves)
    for options in ({}, {"softmax_scale": 0.3}, {"softcap": 2.0}, {"schedule": "ascending"}, {"head_offset": 1}, {"window_size": (40, 0)}):
        torch._dynamo.reset()
        expected = gradients(call, leaves, **options)
        assert all(same_bits(one, other) for one, other in zip(plain, expected, strict=True)) == (not options)
        assert_equal_bits(gradients(compiled(call), leaves, **options), expected)


class Block(nn.Module):
    def __init__(self, width: int, sinks: bool) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.sinks = nn.Parameter(torch.zeros(4)) if sinks else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        q, (k, v) = self.q(y).unflatten(-1, (4, -1)), self.kv(y).unflatten(-1, (2, 2, -1)).unbind(2)
        x = x + self.out(flash_attn_func(q, k, v, causal=True, sinks=self.sinks).flatten(-2))
        return x + self.mlp(self.between(x))


def two_layers(sinks: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(32, sinks), Block(32, sinks))


def train(model: Callable[[Tensor], Tensor], parameters: list[Tensor], lengths: tuple[int, ...]) -> list[Tensor]:
    """Losses, gradients and weights of a few steps on sequences of these lengths."""
    optimizer, seen = torch.optim.SGD(parameters, lr=0.1), []
    for step, length in enumerate(lengths):
        x = torch.randn(2, length, 32, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), *(p.grad.clone() for p in parameters), *(p.detach().clone() for p in parameters)]
    return seen


@pytest.mark.parametrize("sinks", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_a_compiled_transformer_trains_with_the_bits_of_eager(sinks: bool) -> None:
    """One graph for any length, no graph break (fullgraph), forward and backward."""
    lengths = (70, 150, 33, 200, 129)
    eager, traced = two_layers(sinks), two_layers(sinks)
    counter = CompileCounterWithBackend("aot_eager")
    expected = train(eager, list(eager.parameters()), lengths)
    assert_equal_bits(train(compiled(traced, counter), list(traced.parameters()), lengths), expected)
    assert operators(counter) == [2, 2]  # a graph for the first length, then one for any length


@pytest.mark.exhaustive
def test_dynamic_from_the_start_needs_one_graph() -> None:
    counter, model = CompileCounterWithBackend("aot_eager"), two_layers()
    traced = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    train(traced, list(model.parameters()), (70, 150, 33))
    assert operators(counter) == [2]


def operators(counter: CompileCounterWithBackend) -> list[int]:
    """How often each graph calls the operator; a graph that was given up while it was traced is empty."""
    counts = [sum(str(node.target) == "dash_attn.attention" for node in graph.graph.nodes) for graph in counter.graphs]
    return [count for count in counts if count]


def test_the_module_compiles() -> None:
    torch.manual_seed(0)
    layer, x = SelfAttention(32, 4, 2, window_size=(20, 0)), torch.randn(2, 100, 32)
    assert same_bits(compiled(layer)(x), layer(x))


def test_packed_calls_compile_also_with_other_lengths() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    traced = compiled(flash_attn_varlen_func, counter)
    for lengths in ([30, 60], [5, 90], [70, 1, 40], [64, 64, 3]):
        tokens, cu = sum(lengths), torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
        leaves = leaves_of((tokens, 4, 8), (tokens, 2, 8), (tokens, 2, 8), dtype=torch.float32)
        rest = (cu, cu, max(lengths), max(lengths))
        assert_equal_bits(gradients(traced, leaves, *rest, causal=True), gradients(flash_attn_varlen_func, leaves, *rest, causal=True))
    assert len(operators(counter)) <= 3  # the numbers of tokens and of sequences become symbols one after the other


@pytest.mark.parametrize("lengths", [((100, 100), (150, 90), (70, 30)), ((90, 150), (30, 70))], ids=str)
def test_scaled_dot_product_attention_compiles_with_lengths_that_change(lengths: tuple[tuple[int, int], ...]) -> None:
    """More queries than keys make a window whose size is a symbol."""
    traced = compiled(scaled_dot_product_attention)
    for q_len, kv_len in lengths:
        q, k, v, _ = (x.transpose(1, 2) for x in random_inputs(q_len, kv_len))
        assert same_bits(traced(q, k, v, is_causal=True), scaled_dot_product_attention(q, k, v, is_causal=True))


def test_programs_of_other_versions_are_refused() -> None:
    """From a compiler's cache or a saved export, where the operators may have meant something else."""
    *arguments, version = dense_arguments(Causal(), False)
    torch.ops.dash_attn.attention(*arguments, version)  # the control
    with pytest.raises(RuntimeError, match=r"traced with version 1 of dash_attn's operators, .*compile or export it again"):
        torch.ops.dash_attn.attention(*arguments, 1)
    with pytest.raises(RuntimeError, match="version"):  # programs from before there was one
        torch.ops.dash_attn.attention(*arguments)


def test_lse_is_returned() -> None:
    q, k, v, _ = random_inputs(70, 70)
    _, lse = compiled(lambda q: flash_attn_func(q, k, v, return_lse=True))(q)
    assert same_bits(lse, flash_attn_func(q, k, v, return_lse=True)[1])


def test_double_backward_is_refused() -> None:
    arguments = dense_arguments(Causal(), False)
    out, _ = torch.ops.dash_attn.attention(*arguments)
    (dq,) = torch.autograd.grad(out.square().sum(), arguments[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"dash_attn\.attention_backward.* no autograd formula"):
        dq.sum().backward()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_get_shapes(device: str) -> None:
    with FakeTensorMode():
        q = torch.empty(2, 300, 4, 64, dtype=torch.bfloat16, device=device)
        k, v = (torch.empty(2, 100, 2, dim, dtype=torch.bfloat16, device=device) for dim in (64, 32))
        out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
        assert (out.shape, out.dtype, out.device) == ((2, 300, 4, 32), torch.bfloat16, q.device)
        assert (lse.shape, lse.dtype, lse.device) == ((2, 4, 300), torch.float32, q.device)
        cu = torch.empty(3, dtype=torch.int32, device=device)
        tokens = [x.flatten(0, 1) for x in (q, k, v)]
        out, lse = flash_attn_varlen_func(*tokens, cu, cu, 300, 100, return_lse=True)
        assert (out.shape, lse.shape) == ((600, 4, 32), (4, 600))
        with pytest.raises(ValueError, match="unknown schedule"):
            flash_attn_func(q, k, v, schedule="fastest")


def test_sharded_tensors_are_refused_not_misread() -> None:
    script = """
import torch, torch.distributed as dist
from torch.distributed.tensor import init_device_mesh, distribute_tensor, Shard
from dash_attn import flash_attn_func
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = distribute_tensor(torch.randn(1, 70, 2, 8), init_device_mesh("cpu", (1,)), [Shard(2)])
flash_attn_func(x, x, x)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "dash_attn.attention.default does not have a sharding strategy" in done.stderr


BAD: list[tuple[dict[str, Any], str]] = [
    ({"dropout_p": 1.0}, "dropout_p must be 0, or from"),
    ({"dropout_p": 0.1, "dropout_seed": torch.zeros(2, dtype=torch.int64)}, "dropout_seed must be 1 numbers of torch.int64"),
    ({"alibi_slopes": torch.ones(3)}, "alibi_slopes must be floating-point numbers of shape"),
    ({"schedule": "fastest"}, "unknown schedule 'fastest'"),
    ({"softcap": -1.0}, "softcap must be"),
    ({"window_size": (-2, 0)}, "window_size must be"),
    ({"mask": Documents((3, 4))}, "documents need as many queries as keys"),
    ({"sinks": torch.zeros(3)}, "sinks must be 2 floating-point numbers"),
    ({"backend": "hopper"}, "backend 'hopper' needs cuda tensors"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[message for _, message in BAD])
def test_what_eager_refuses_is_refused_while_tracing(options: dict[str, Any], message: str) -> None:
    q, k, v, _ = random_inputs(10, 10)
    with pytest.raises(Exception, match=message):
        compiled(flash_attn_func)(q, k, v, **options)


def test_exported_programs_hold_the_operator() -> None:
    model, x = two_layers(), torch.randn(2, 70, 32)
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(model, (x,), dynamic_shapes=({1: length},))
    assert "dash_attn.attention" in str(program.graph)
    longer = torch.randn(2, 131, 32)
    assert same_bits(program.module()(longer), model(longer))


def test_an_operator_refuses_heads_of_no_dim_in_our_words() -> None:
    """The scale that it would compute of them does not exist."""
    q, k, v = leaves_of((2, 9, 4, 0), (2, 9, 2, 0), (2, 9, 2, 0))
    with pytest.raises(ValueError, match="there must be at least one head and one head dim"):
        torch.ops.dash_attn.attention(q, k, v, None, None, None, None, None, None, 0, 0, "full", [], None, *CHOICES[1:])
