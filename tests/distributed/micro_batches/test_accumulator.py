"""TreeAccumulator in one process: the sum by definition, odd parameters, misuse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dash_attn.distributed import TreeAccumulator
from dash_attn.distributed.micro_batches import buckets
from dash_attn.distributed.micro_batches.accumulator import MUST_AGREE, Report
from tree_models import OddModel, backward, bits, gradients, mean_by_definition, mlp

COUNTS = [*range(1, 18), 64]


def accumulated(model: nn.Module, micro_batches: int) -> dict[str, Tensor | None]:
    accumulator = TreeAccumulator(micro_batches)
    for index in accumulator.owned:
        backward(model, index)
        accumulator.add(model)
    accumulator.finish(model)
    return gradients(model)


def plainly(model: nn.Module, micro_batches: int) -> dict[str, Tensor | None]:
    """The control: PyTorch adds one after another."""
    for index in range(micro_batches):
        backward(model, index)
    return {name: None if g is None else g / micro_batches for name, g in gradients(model).items()}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("make", [mlp, OddModel])
def test_the_mean_is_the_one_by_definition(make: Callable[[], nn.Module], count: int) -> None:
    expected = mean_by_definition(make(), count)
    found = accumulated(make(), count)
    assert bits(found.values()) == bits(expected.values())
    if count > 3:
        assert bits(plainly(make(), count).values()) != bits(expected.values())


def test_bits_do_not_depend_on_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = bits(accumulated(OddModel(), 6).values())
    for size in (1, 64, 300):
        monkeypatch.setattr(buckets, "BUCKET_BYTES", size)
        assert bits(accumulated(OddModel(), 6).values()) == expected


def test_buckets_are_as_large_as_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 400)
    parameters = dict(mlp().named_parameters())  # 96, 16, 48 and 3 elements of four bytes
    found = list(buckets.buckets_of(parameters, dict.fromkeys(parameters, (True,))))
    assert [list(bucket.parameters) for bucket in found] == [["0.weight"], ["0.bias", "2.weight", "2.bias"]]


def test_parameters_without_gradient() -> None:
    model = OddModel()
    found = accumulated(model, 5)
    assert found["never"] is None
    assert found["frozen.weight"] is None
    assert found["empty"] is not None
    assert found["narrow.weight"] is not None
    assert found["narrow.weight"].dtype == torch.bfloat16
    assert "tied.weight" not in found
    assert len({g.untyped_storage().data_ptr() for g in found.values() if g is not None and g.numel()}) == sum(
        g is not None and g.numel() > 0 for g in found.values()
    )


def test_a_missing_gradient_adds_nothing() -> None:
    """Not even a zero, which would turn -0.0 into 0.0."""
    model = nn.Linear(2, 1, bias=False)
    accumulator = TreeAccumulator(3)
    other = nn.Module()
    other.model, other.rest = model, nn.Parameter(torch.ones(1))
    for has_gradient in (False, True, False):
        other.rest.grad = torch.ones(1)
        model.weight.grad = torch.tensor([[-0.0, 3.0]]) if has_gradient else None
        accumulator.add(other)
    accumulator.finish(other)
    assert model.weight.grad is not None
    assert bits([model.weight.grad]) == bits([torch.tensor([[-0.0, 1.0]])])


def test_sums_of_16_bit_gradients_are_float32() -> None:
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    accumulator = TreeAccumulator(4)
    for value in (256.0, 1.0, 1.0, 1.0):  # 257 is no bf16
        model.weight.grad = torch.tensor([[value]], dtype=torch.bfloat16)
        accumulator.add(model)
    accumulator.finish(model, divide=False)
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 260  # one after another in bf16: 256
    assert model.weight.grad.dtype == torch.bfloat16


def test_gradients_of_another_dtype_than_the_parameter() -> None:
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this PyTorch has no grad_dtype")
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    model.weight.grad_dtype = torch.float32
    accumulator = TreeAccumulator(2)
    for value in (256.0, 1.0):
        model.weight.grad = torch.tensor([[value]])
        accumulator.add(model)
    accumulator.finish(model, divide=False)
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 257


def test_weights_divide_once_at_the_root() -> None:
    model = mlp()
    accumulator = TreeAccumulator(3)
    for index, tokens in enumerate((10, 0, 25)):
        backward(model, index)
        accumulator.add(model, weight=tokens)
    accumulator.finish(model)
    weighted = gradients(model)
    total = accumulated_sum(mlp(), 3)
    assert bits(weighted.values()) == bits(g / torch.tensor(35.0) for g in total.values() if g is not None)


def accumulated_sum(model: nn.Module, count: int) -> dict[str, Tensor | None]:
    accumulator = TreeAccumulator(count)
    for index in range(count):
        backward(model, index)
        accumulator.add(model)
    accumulator.finish(model, divide=False)
    return gradients(model)


def test_layouts_of_memory_are_kept() -> None:
    model = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    expected = []
    for index in range(2):
        model(torch.full((1, 3, 5, 5), float(index + 1))).sum().backward()
        expected.append(copy.deepcopy(model.weight.grad))
        model.zero_grad()
    accumulator = TreeAccumulator(2)
    for gradient in expected:
        model.weight.grad = gradient
        accumulator.add(model)
    accumulator.finish(model)
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, (expected[0] + expected[1]) / 2)
    assert model.weight.grad.stride() == model.weight.stride()


def test_memory_is_that_of_the_carry_stack() -> None:
    model = mlp()
    accumulator = TreeAccumulator(16)
    for index in range(16):
        backward(model, index)
        accumulator.add(model)
        assert {len(stack._waiting) for stack in accumulator._stacks.values()} == {(index + 1).bit_count()}
        assert all(p.grad is None for p in model.parameters())


def test_gradients_that_others_hold_are_left_alone() -> None:
    """An optimizer, or a user who logs them, may keep a reference."""
    model = nn.Linear(2, 1, bias=False)
    held = torch.ones(1, 2)
    accumulator = TreeAccumulator(2)
    for _ in range(2):
        model.weight.grad = held
        accumulator.add(model)
    accumulator.finish(model, divide=False)
    assert torch.equal(held, torch.ones(1, 2))
    assert torch.equal(gradients(model)["weight"], torch.full((1, 2), 2.0))  # type: ignore[arg-type]


def one_add(model: nn.Module, **options: Any) -> TreeAccumulator:
    accumulator = TreeAccumulator(2)
    backward(model, 0)
    accumulator.add(model, **options)
    return accumulator


def test_wrong_numbers_of_adds_raise() -> None:
    model = mlp()
    accumulator = one_add(model)
    with pytest.raises(RuntimeError, match="no parameter has a gradient: call add once after the backward"):
        accumulator.add(model)
    with pytest.raises(RuntimeError, match="rank 0 must add 2 of the 2 micro-batches before finish; it added 1"):
        accumulator.finish(model)
    with pytest.raises(RuntimeError, match="it added 0"):
        accumulator.finish(model)
    for index in range(2):
        backward(model, index)
        accumulator.add(model)
    backward(model, 2)
    with pytest.raises(
        RuntimeError, match="rank 0 has added 2 of its 2 micro-batches, and cannot add 1 more: call finish, or reset on all"
    ):
        accumulator.add(model)
    with pytest.raises(RuntimeError, match="4 parameters of rank 0 have gradients that were not added"):
        accumulator.finish(model)


def test_gradients_of_the_last_step_raise() -> None:
    model = mlp()
    accumulator = TreeAccumulator(1)
    backward(model, 0)
    accumulator.add(model)
    accumulator.finish(model)
    backward(model, 1)
    with pytest.raises(RuntimeError, match="still has the gradient of the last step: call zero_grad"):
        accumulator.add(model)
    model.zero_grad()
    backward(model, 1)
    accumulator.add(model)
    accumulator.finish(model)
    found = bits(gradients(model).values())
    model.zero_grad()
    backward(model, 1)
    assert bits(gradients(model).values()) == found


def test_reset_forgets_the_step() -> None:
    model = mlp()
    accumulator = one_add(model)
    accumulator.reset()
    for index in range(2):
        backward(model, index)
        accumulator.add(model)
    accumulator.finish(model)
    assert bits(gradients(model).values()) == bits(accumulated(mlp(), 2).values())


def test_a_model_that_changes_within_a_step_raises() -> None:
    model = mlp()
    accumulator = one_add(model)
    model[0].bias.requires_grad_(False)  # type: ignore[operator, union-attr]
    backward(model, 1)
    with pytest.raises(ValueError, match=r"must not change within a step; what changed: 0\.bias"):
        accumulator.add(model)


def sparse() -> nn.Module:
    model = nn.Embedding(4, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()
    return model


def complex_numbers() -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    return model


def frozen_with_gradient() -> nn.Module:
    model = mlp()
    backward(model, 0)
    return model.requires_grad_(False)


def subclass_gradient() -> nn.Module:
    class Sharded(Tensor):
        pass

    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.ones(1, 2).as_subclass(Sharded)
    return model


def without_values() -> nn.Module:
    model = nn.Linear(2, 1, device="meta")
    model(torch.ones(1, 2, device="meta")).sum().backward()
    return model


def fully_sharded() -> nn.Module:
    """What fully_shard makes of a class, without a group."""
    from torch.distributed.fsdp import FSDPModule

    return type("FSDPLinear", (FSDPModule, nn.Linear), {"__new__": lambda cls, *_: nn.Module.__new__(cls)})(2, 2)


def replicated() -> nn.Module:
    """What replicate makes of a class, without a group."""
    from torch.distributed._composable.replicate import DDP

    return type("DDPLinear", (DDP, nn.Linear), {"__new__": lambda cls, *_: nn.Module.__new__(cls)})(2, 2)


class DDP(nn.Linear):
    """Only a name."""


class FullyShardedDataParallel(nn.Linear):
    """A stand-in: it is known by its name."""


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (sparse, ValueError, r"gradient of 'weight' must be dense; got layout torch.sparse_coo: build its layer with sparse=False"),
        (complex_numbers, ValueError, r"gradient of 'weight' must have one of torch.float64, .*; got torch.complex64"),
        (without_values, ValueError, "gradient of 'weight' must have values; got one on the meta device"),
        (frozen_with_gradient, ValueError, r"parameter '0.weight' is frozen but has a gradient"),
        (lambda: mlp().requires_grad_(False), ValueError, "no parameter that requires a gradient"),
        (subclass_gradient, TypeError, "gradient of 'weight' must be a plain tensor with all elements; got Sharded"),
        (lambda: FullyShardedDataParallel(2, 2), ValueError, "FullyShardedDataParallel adds gradients over its ranks during backward"),
        (fully_sharded, ValueError, r"fully_shard \(FSDP2\) adds gradients .*, and keeps the sums or shards of them, so that"),
        (replicated, ValueError, "replicate adds gradients over its ranks during backward, in an order of its own"),
        (lambda: DDP(2, 2), RuntimeError, "no parameter has a gradient"),
        (lambda: list(mlp().parameters()), TypeError, "model must be an nn.Module; got list"),
    ],
)
def test_what_cannot_be_added_raises(make: Callable[[], nn.Module], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        TreeAccumulator(2).add(make())


@pytest.mark.parametrize("weight", [-1, 0.5, True, torch.tensor(3)])
def test_weights_are_whole_numbers(weight: Any) -> None:
    with pytest.raises(ValueError, match="weight must be a whole number >= 0"):
        one_add(mlp(), weight=weight)


def test_weights_that_are_all_zero_raise() -> None:
    model = mlp()
    accumulator = one_add(model, weight=0)
    backward(model, 1)
    accumulator.add(model, weight=0)
    with pytest.raises(ValueError, match="weights of all micro-batches are 0"):
        accumulator.finish(model)


def test_wrong_arguments_raise() -> None:
    with pytest.raises(ValueError, match="micro_batches must be a whole number >= 1"):
        TreeAccumulator(0)
    with pytest.raises(TypeError, match="group must be a ProcessGroup, a DeviceMesh of one dimension or None; got int"):
        TreeAccumulator(1, group=4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="divide must be True or False"):
        one_add(mlp()).finish(mlp(), divide="no")  # type: ignore[arg-type]


def test_every_field_that_must_agree_is_in_the_report() -> None:
    assert set(MUST_AGREE) <= set(Report._fields)


def test_a_weight_that_no_message_holds_is_refused_where_it_is_given() -> None:
    """Not in finish, on one rank, while the others wait. The control: the largest that is allowed."""
    model, accumulator = mlp(), TreeAccumulator(1)
    backward(model, 0)
    with pytest.raises(ValueError, match=r"weight must be below 1,099,511,627,776, .* got 1099511627776"):
        accumulator.add(model, weight=2**40)
    accumulator.add(model, weight=2**40 - 1)
    accumulator.finish(model)
