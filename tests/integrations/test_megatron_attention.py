"""DashCoreAttention with Megatron-Core's arguments: what it computes, and what it refuses. Megatron need not be installed."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn import Causal, Mask, Window, flash_attn_func, flash_attn_varlen_func
from dash_attn.integrations.megatron import DashCoreAttention, enable
from dense import dense, element_mask, same_bits
from megatron_stand_ins import MaskType, PackedSeqParams, config, ranks

LENGTH, BATCH, DIM = 150, 2, 16


def layer(place: int = 0, places: int = 1, kind: str = "causal", **changes: Any) -> DashCoreAttention:
    return DashCoreAttention(config(**changes), 1, MaskType[kind], "self", pg_collection=ranks(place, places))


def tensors(heads: int = 4, kv_heads: int = 2, value_dim: int = DIM, packed: bool = False) -> list[Tensor]:
    """Query, key, value, gradient of the output, as Megatron lays them out."""
    source = torch.Generator().manual_seed(0)
    batch = () if packed else (BATCH,)
    shapes = (heads, DIM), (kv_heads, DIM), (kv_heads, value_dim), (heads * value_dim,)
    made = [torch.randn(LENGTH, *batch, *shape, generator=source) for shape in shapes]
    return [x.requires_grad_() for x in made[:3]] + made[3:]


def run(attention: DashCoreAttention, made: list[Tensor], **arguments: Any) -> list[Tensor]:
    """Output and gradients."""
    *inputs, dout = made
    out = attention(*inputs, **arguments)
    return [out, *torch.autograd.grad(out, inputs, dout)]


def packed_params(*lengths: int, **changes: Any) -> PackedSeqParams:
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return PackedSeqParams(
        **{"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths)} | changes
    )


@pytest.mark.parametrize("kind", ["causal", "causal_bottom_right", "no_mask"])
def test_dense_attention_in_megatrons_layout(kind: str) -> None:
    made = tensors(value_dim=24)  # multi-latent attention has values of another size
    found = run(layer(kind=kind, softmax_scale=None), made)
    q, k, v = (x.transpose(0, 1) for x in made[:3])
    keep = element_mask(Causal(), LENGTH, LENGTH) if "causal" in kind else torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    expected = dense(q, k, v, keep)[0].transpose(0, 1).flatten(2)
    truth = [expected, *torch.autograd.grad(expected, made[:3], made[3])]
    assert found[0].shape == (LENGTH, BATCH, 4 * 24)
    assert found[0].is_contiguous()
    for ours, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_mask_type_of_the_call_wins() -> None:
    made = tensors()
    called = run(layer(kind="causal"), made, attn_mask_type=MaskType.no_mask)
    built = run(layer(kind="no_mask"), made)
    assert all(same_bits(one, other) for one, other in zip(called, built, strict=True))
    assert not same_bits(called[0], run(layer(kind="causal"), made)[0])


def test_scale_reaches_the_scores() -> None:
    made = tensors()
    attention = DashCoreAttention(config(), 1, MaskType.causal, "self", softmax_scale=0.5, pg_collection=ranks())
    assert not same_bits(run(attention, made)[0], run(layer(), made)[0])
    q, k, v = (x.transpose(0, 1) for x in made[:3])
    assert same_bits(run(attention, made)[0], flash_attn_func(q, k, v, softmax_scale=0.5, causal=True).transpose(0, 1).flatten(2))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_ranks_have_the_bits_of_the_whole_model(dropout: float) -> None:
    """With dropout as well: seeds come from the generator that Megatron keeps alike on the ranks of a tensor."""
    made = tensors()
    torch.manual_seed(3)
    whole = run(layer(attention_dropout=dropout), made)

    def shard(place: int, **changes: Any) -> list[Tensor]:
        queries, keys, width = slice(2 * place, 2 * place + 2), slice(place, place + 1), slice(2 * place * DIM, (2 * place + 2) * DIM)
        parts = [x[:, :, heads].detach().clone().requires_grad_() for x, heads in zip(made[:3], (queries, keys, keys), strict=True)]
        attention = layer(place, 2, attention_dropout=dropout)
        torch.manual_seed(3)
        attention.head_offset = changes.get("head_offset", attention.head_offset)
        return run(attention, [*parts, made[3][:, :, width]])

    shards = [shard(place) for place in range(2)]
    for whole_part, *parts in zip(whole, *shards, strict=True):
        assert same_bits(whole_part, torch.cat(parts, 2))
    without = shard(1, head_offset=0)  # the control: the second rank as if it were the first
    assert not all(same_bits(one, other) for one, other in zip(shards[1], without, strict=True))


@pytest.mark.parametrize("kind", ["causal", "padding_causal", "no_mask", "padding"])
@pytest.mark.parametrize("longest", ["given", "missing"])
def test_packed_sequences_have_the_bits_they_have_alone(kind: str, longest: str) -> None:
    made = tensors(packed=True)
    changes = {} if longest == "given" else {"max_seqlen_q": None, "max_seqlen_kv": None}
    found = run(layer(kind=kind), made, packed_seq_params=packed_params(70, 1, 79, **changes))
    assert found[0].shape == (LENGTH, 4 * DIM)
    for part in (slice(0, 70), slice(70, 71), slice(71, 150)):
        alone = [x[part, None].detach().clone().requires_grad_() for x in made[:3]]
        expected = run(layer(kind="causal" if "causal" in kind else "no_mask"), [*alone, made[3][part, None]])
        for ours, theirs in zip(found, expected, strict=True):
            assert same_bits(ours[part], theirs[:, 0])


def test_one_tensor_may_be_named_twice() -> None:
    plain = packed_params(70, 80)
    named = packed_params(70, 80, cu_seqlens_q=plain.cu_seqlens_q, cu_seqlens_kv=plain.cu_seqlens_q)
    named.cu_seqlens_q_padded, named.cu_seqlens_kv_padded, named.local_cp_size = named.cu_seqlens_q, named.cu_seqlens_q, 1
    made = tensors(packed=True)
    assert same_bits(*(run(layer(), made, packed_seq_params=params)[0] for params in (plain, named)))


def test_a_zero_sink_for_softmax_off_by_one() -> None:
    made = tensors()
    found = run(layer(softmax_type="off-by-one"), made)[0]
    q, k, v = (x.transpose(0, 1) for x in made[:3])
    expected = flash_attn_func(q, k, v, causal=True, sinks=torch.zeros(4)).transpose(0, 1).flatten(2)
    assert same_bits(found, expected)
    assert not same_bits(found, run(layer(), made)[0])


CONFIGS = {
    "dropout of everything": ({"attention_dropout": 1.0}, r"dropout_p must be 0, or from 1/65536 to 1 - 1/65536; got 1.0"),
    "context parallelism": ({"context_parallel_size": 2}, "takes context_parallel_size=1; the config has 2"),
    "clipped logits": ({"qk_clip": True}, "takes qk_clip=False; the config has True"),
    "logged logits": ({"log_max_attention_logit": True}, "takes log_max_attention_logit=False"),
    "FP8": ({"fp8_dot_product_attention": True}, "takes fp8_dot_product_attention=False"),
    "FP8 with projections": ({"fp8_multi_head_attention": True}, "takes fp8_multi_head_attention=False"),
    "decoding past the core attention": ({"flash_decode": True}, "takes flash_decode=False.*calls flash-attn"),
    "another softmax": (
        {"softmax_type": "sigmoid"},
        "takes softmax_type=vanilla or off-by-one or learnable; the config has sigmoid",
    ),
    "another backend": ({"attention_backend": SimpleNamespace(name="flash")}, "takes attention_backend=auto.*the config has flash"),
    "heads that do not divide": ({"num_query_groups": 3}, "needs num_query_groups to be a multiple.*got 3 heads on 2 ranks"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_that_raise(name: str) -> None:
    changes, message = CONFIGS[name]
    layer(places=2)  # the control: without the change it can be built
    with pytest.raises(ValueError, match=message):
        layer(places=2, **changes)


@pytest.mark.parametrize("packed", [False, True])
def test_dropout_is_that_of_our_functions_and_in_training_only(packed: bool) -> None:
    """The argument of the layer counts more than the configuration."""
    made = tensors(packed=packed)
    arguments = {"packed_seq_params": packed_params(70, 80)} if packed else {}
    built = DashCoreAttention(config(attention_dropout=0.1), 1, MaskType.causal, "self", attention_dropout=0.3, pg_collection=ranks())
    torch.manual_seed(5)
    found = run(built, made, **arguments)[0]
    torch.manual_seed(5)
    if packed:
        expected = flash_attn_varlen_func(*made[:3], *(arguments["packed_seq_params"].cu_seqlens_q,) * 2, 80, 80, 0.3, causal=True).flatten(
            1
        )
    else:
        expected = flash_attn_func(*(x.transpose(0, 1) for x in made[:3]), 0.3, causal=True).transpose(0, 1).flatten(2)
    assert same_bits(found, expected)
    assert not same_bits(found, run(built, made, **arguments)[0]), "other seeds"
    assert same_bits(run(built.eval(), made, **arguments)[0], run(layer(), made, **arguments)[0])


def test_a_collection_without_the_tensor_parallel_group_raises() -> None:
    with pytest.raises(ValueError, match="tensor-parallel group"):
        DashCoreAttention(config(), 1, MaskType.causal, "self", pg_collection=SimpleNamespace())


CALLS = {
    "a mask tensor": ({"attention_mask": torch.ones(1, 1, 2, 2)}, r"mask tensors; got an attention_mask of shape \(1, 1, 2, 2\)"),
    "a bias": ({"attention_bias": torch.ones(1, 4, 2, 2)}, "does not support attention_bias"),
    "inputs of sparse attention": (
        {"x": torch.ones(1), "qr": torch.ones(1)},
        r"does not support x \(a Tensor\), qr \(a Tensor\), which the layer passed and whose meaning is not known",
    ),
    "any mask": ({"attn_mask_type": MaskType.arbitrary}, "takes the mask types causal.*; got arbitrary"),
    "padding": ({"attn_mask_type": MaskType.padding}, "attn_mask_type=padding with packed sequences only"),
    "padding, causal": ({"attn_mask_type": MaskType.padding_causal}, "attn_mask_type=padding_causal with packed sequences only"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_raise(name: str) -> None:
    arguments, message = CALLS[name]
    with pytest.raises(ValueError, match=message):
        layer()(*tensors()[:3], **arguments)


PACKED: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"qkv_format": "sbhd"}, "qkv_format='thd'; got 'sbhd'"),
    "gaps": ({"cu_seqlens_q_padded": torch.tensor([0, 80, 150])}, "lie end to end: cu_seqlens_q_padded must be None or"),
    "ranks": ({"local_cp_size": 2}, "does not support local_cp_size of packed_seq_params; got 2"),
    "a group": ({"cp_group": "a group"}, "does not support cp_group"),
    "a later field": ({"pad_between_seqs": True}, "does not support pad_between_seqs"),
    "two tensors": ({"cu_seqlens_kv": torch.tensor([0, 70, 150], dtype=torch.int32)}, "cu_seqlens_q and cu_seqlens_kv are one tensor"),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_that_raise(name: str) -> None:
    changes, message = PACKED[name]
    made = tensors(packed=True)[:3]
    layer()(*made, packed_seq_params=packed_params(70, 80))  # the control
    with pytest.raises(ValueError, match=message):
        layer()(*made, packed_seq_params=packed_params(70, 80, **changes))


def test_causal_masks_need_as_many_keys_as_queries() -> None:
    query, key, value = tensors()[:3]
    with pytest.raises(ValueError, match="as many keys as queries; got 1 queries and 150 keys"):
        layer()(query[-1:], key, value)
    last = layer(kind="causal_bottom_right")(query[-1:], key, value)
    torch.testing.assert_close(last, layer()(query, key, value)[-1:])


@pytest.mark.parametrize("shapes", [(2, 1), (4, 4)])
def test_other_heads_than_the_ranks_raise(shapes: tuple[int, int]) -> None:
    with pytest.raises(
        ValueError,
        match=re.escape(f"built for 4 query heads and 2 key heads on this tensor-parallel rank; got {shapes[0]} and {shapes[1]}"),
    ):
        layer()(*tensors(*shapes)[:3])


def test_another_layout_raises() -> None:
    with pytest.raises(ValueError, match=r"takes \(length, batch, heads, head dim\); got a query of shape \(150, 4, 16\)"):
        layer()(*tensors(packed=True)[:3])


def test_specs_without_a_core_attention_raise() -> None:
    with pytest.raises(ValueError, match="found no core_attention"):
        enable(SimpleNamespace())


@pytest.mark.parametrize(("window", "mask"), [((40, 0), Window(40, 0)), ((-1, 0), Causal())])
def test_windows(window: tuple[int, int], mask: Mask) -> None:
    attention = layer()
    attention.window = window
    made = tensors()
    q, k, v = (x.transpose(0, 1) for x in made[:3])
    assert same_bits(run(attention, made)[0], flash_attn_func(q, k, v, mask=mask).transpose(0, 1).flatten(2))


def test_windows_that_contradict_the_mask_raise() -> None:
    attention = layer()
    attention.window = (40, 10)
    with pytest.raises(ValueError, match=r"takes window_size=\(left, 0\) with attn_mask_type=causal; got \(40, 10\)"):
        attention(*tensors()[:3])
    attention(*tensors()[:3], attn_mask_type=MaskType.no_mask)
