"""DashCoreAttention inside GPT models of the megatron-core package, on the CPU, against Megatron's own DotProductAttention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

# Not installed; or a newer one, which imports Triton: PyTorch's CPU builds do not bring it. Transformer Engine and Apex are not needed.
pytest.importorskip("megatron.core.models.gpt", reason="needs megatron-core 0.16 (in the dev extra)", exc_type=ImportError)

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

import megatron_stand_ins
from dash_attn import Causal, Mask, Window
from dash_attn.integrations.megatron import DashCoreAttention, enable
from dense import element_mask, same_bits
from megatron_models import LENGTH, loss_and_gradients, megatron_on_the_cpu, model, ours, sharded_gpt, tokens
from processes import run_processes


@pytest.fixture
def _one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with megatron_on_the_cpu():
            yield
    finally:
        torch.distributed.destroy_process_group()


def masked(mask: Mask) -> Tensor:
    """True where Megatron's DotProductAttention is to attend to nothing."""
    return ~element_mask(mask, LENGTH, LENGTH)[None, None]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Mask]] = {  # ours, Megatron's, the mask that Megatron is given
    "grouped": ({}, {}, Causal()),
    "learnable sinks": ({"softmax_type": "learnable"}, {"softmax_type": "learnable"}, Causal()),
    "off by one": ({"softmax_type": "off-by-one"}, {"softmax_type": "off-by-one"}, Causal()),
    "scaled by layer": ({"apply_query_key_layer_scaling": True}, {"apply_query_key_layer_scaling": True}, Causal()),
    "scale": ({"softmax_scale": 0.7}, {"softmax_scale": 0.7}, Causal()),
    "window": ({"window_size": (40, 0)}, {}, Window(40, 0)),
}


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_megatrons(name: str) -> None:
    mine, theirs, mask = CASES[name]
    found = loss_and_gradients(ours(**mine))
    expected = loss_and_gradients(model(get_gpt_layer_local_spec(), **theirs), masked(mask))
    assert found.keys() == expected.keys()  # the same weights by the same names
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("_one_rank")
def test_two_trainings_end_with_the_same_weights() -> None:
    def train(seed: int) -> list[Tensor]:
        net = ours(seed=seed, softmax_type="learnable")
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for _ in range(3):
            loss_and_gradients(net)
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    first, second, other = train(0), train(0), train(1)
    assert all(same_bits(one, two) for one, two in zip(first, second, strict=True))
    assert not all(same_bits(one, two) for one, two in zip(first, other, strict=True))


@pytest.mark.usefixtures("_one_rank")
def test_packed_sequences_through_a_whole_model() -> None:
    net = ours().eval()
    batch, positions = tokens(rows=1)
    ends = torch.tensor([0, 60, LENGTH], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=90, max_seqlen_kv=90)
    both = net(batch, positions, None, packed_seq_params=packed)
    for part in (slice(0, 60), slice(60, LENGTH)):
        alone = net(batch[:, part], positions[:, : part.stop - part.start], None)
        torch.testing.assert_close(both[:, part], alone, rtol=1e-4, atol=1e-5)
    apart = net(batch, positions, None)
    assert not torch.allclose(both[:, 60:], apart[:, 60:], rtol=1e-2, atol=1e-2)  # the control: one document


@pytest.mark.usefixtures("_one_rank")
def test_windows_of_some_layers() -> None:
    net = ours(window_size=(40, 0), window_attn_skip_freq=2)
    assert [layer.self_attention.core_attention.window for layer in net.decoder.layers] == [(40, 0), None]


@pytest.mark.usefixtures("_one_rank")
def test_sinks_are_sharded_by_head() -> None:
    attention = ours(softmax_type="learnable").decoder.layers[0].self_attention.core_attention
    assert attention.softmax_offset.tensor_model_parallel
    assert attention.softmax_offset.partition_dim == 0
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    assert list(attention.sharded_state_dict("there.", metadata=groups)) == ["there.softmax_offset"]
    assert ours().decoder.layers[0].self_attention.core_attention.sharded_state_dict("there.") == {}


def test_specs_of_blocks_are_copied() -> None:
    spec = get_gpt_layer_local_spec()
    block = enable(TransformerBlockSubmodules(layer_specs=[spec, spec]))
    assert [one.submodules.self_attention.submodules.core_attention for one in block.layer_specs] == [DashCoreAttention] * 2
    assert spec.submodules.self_attention.submodules.core_attention is not DashCoreAttention
    enable(block)  # ours may stand there already


def test_specs_with_another_attention_raise() -> None:
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = nn.Identity
    with pytest.raises(ValueError, match="stands in for DotProductAttention and TEDotProductAttention; the spec has Identity"):
        enable(spec)


@pytest.mark.usefixtures("_one_rank")
def test_what_a_model_asks_for_raises() -> None:
    with pytest.raises(ValueError, match=r"takes flash_decode=False; the config has True"):
        ours(flash_decode=True)
    with pytest.raises(ValueError, match="does not take mask tensors"):
        loss_and_gradients(ours(), masked(Causal()))


@pytest.mark.usefixtures("_one_rank")
def test_dropout_of_the_configuration_follows_the_generator() -> None:
    net, found = ours(attention_dropout=0.1), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(loss_and_gradients(net))
    assert all(same_bits(found[0][name], found[1][name]) for name in found[0])
    assert not same_bits(found[0]["loss"], found[2]["loss"])


def test_stand_ins_have_what_megatron_has() -> None:
    assert {kind.name: kind.value for kind in AttnMaskType} == {kind.name: kind.value for kind in megatron_stand_ins.MaskType}
    known = {field.name for field in fields(megatron_stand_ins.PackedSeqParams)} | {"total_tokens", "seq_idx", "tokens_per_sample"}
    assert {field.name for field in fields(PackedSeqParams)} <= known


@pytest.mark.usefixtures("_one_rank")
def test_without_groups_the_ranks_of_megatron_are_taken() -> None:
    attention = DashCoreAttention(ours().config, 1, AttnMaskType.causal, "self")
    assert attention.tp_group is parallel_state.get_tensor_model_parallel_group()


@pytest.mark.exhaustive
def test_tensor_parallel_ranks_keep_the_bits_of_the_whole_model() -> None:
    ranks = run_processes(sharded_gpt, 2)
    for rank in ranks:
        assert rank["losses"][0] == pytest.approx(rank["losses"][1], rel=1e-5)
        assert rank["same_inputs"] == rank["same"] == [True] * 3
    assert not all(ranks[1]["same_without"])  # the control: its head as if it were the first
