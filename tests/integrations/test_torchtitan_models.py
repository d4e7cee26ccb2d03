"""The doors of torchtitan inside its own models, on the CPU. Tried with torchtitan 0.3.0 of PyPI, which CI does not install:

    pip install --no-deps --target SOMEWHERE torchtitan==0.3.0 spmd_types==0.2.3 tyro docstring_parser

(its other requirements contradict those of the dev extra), and SOMEWHERE on PYTHONPATH.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchtitan", reason="needs torchtitan 0.3")

import torchtitan_models as models  # first: it stands in for kernels that torchtitan imports, where Triton is missing

# isort: split
from torchtitan.config import Configurable, OverrideConfig, apply_overrides
from torchtitan.models import deepseek_v3, gpt_oss, kimi_k2_7, llama3, muse_glimmer, qwen3
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from dash_attn.integrations.torchtitan import DashDocumentAttention, DashScaledDotProductAttention, enable
from dense import same_bits
from processes import run_processes

NAME = "dash_attn.integrations.torchtitan.dash_attention"


def small(package: Any, attn_backend: str) -> Any:
    config = package.model_registry("debugmodel", attn_backend=attn_backend).model
    config.layers = config.layers[:2]
    return config


@pytest.mark.parametrize("backend", ["flex", "varlen"])
@pytest.mark.parametrize("package", [
    pytest.param(llama3, id="llama3"),
    pytest.param(qwen3, id="qwen3", marks=pytest.mark.exhaustive),
    pytest.param(deepseek_v3, id="deepseek_v3", marks=pytest.mark.exhaustive),  # values of another head dim
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_loss_and_gradients_are_torchtitans(package: Any, backend: str) -> None:
    expected = models.loss_and_gradients(models.built(small(package, "flex")))
    found = models.loss_and_gradients(models.built(enable(small(package, backend))))
    assert found.keys() == expected.keys()  # the same weights by the same names
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_documents_count() -> None:
    """The control of the test above: its masks do something."""
    net = models.built(enable(small(llama3, "flex")))
    assert abs(models.loss_and_gradients(net)["loss"] - models.loss_and_gradients(net, documents=False)["loss"]) > 1e-4


@pytest.mark.exhaustive
@pytest.mark.parametrize("layer", [0, 1])
def test_sinks_and_windows_of_gpt_oss(layer: int) -> None:
    """Its attention alone: its experts do not run on the CPU. One layer has a window."""
    Model = gpt_oss.GptOssModel
    _, positions = models.batch()
    x = torch.randn(2, models.LENGTH, small(gpt_oss, "varlen").dim, generator=torch.Generator().manual_seed(0))

    def results(config: Any) -> list[Tensor]:
        torch.manual_seed(0)
        own = config.layers[layer].attention
        attention = own.build()
        attention.init_states()
        nn.init.ones_(attention.sinks)
        model: Any = SimpleNamespace(config=config, _create_flex_attention_mask=partial(Model._create_flex_attention_mask, None))
        masks = Model.get_attention_masks(model, positions)
        if isinstance(masks, dict):
            masks = masks["basic_mask" if own.sliding_window_size is None else "sliding_window_mask"]
        out = attention(x, masks, positions)
        return [out, *torch.autograd.grad(out.square().sum(), attention.parameters())]

    for found, expected in zip(results(enable(small(gpt_oss, "varlen"))), results(small(gpt_oss, "flex")), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_two_trainings_end_with_the_same_weights() -> None:
    def train(seed: int) -> list[Tensor]:
        net = models.built(enable(small(llama3, "varlen")), seed)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for _ in range(3):
            models.loss_and_gradients(net)
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    first, second, other = train(0), train(0), train(1)
    assert all(same_bits(one, two) for one, two in zip(first, second, strict=True))
    assert not all(same_bits(one, two) for one, two in zip(first, other, strict=True))


def test_blocks_trace_whole() -> None:
    """torchtitan compiles each block with fullgraph=True."""
    net: Any = models.built(enable(small(llama3, "varlen")))
    expected = models.loss_and_gradients(net)
    for block in net.layers.values():
        block.compile(backend="aot_eager", fullgraph=True)
    found = models.loss_and_gradients(net)
    assert all(same_bits(found[name], value) for name, value in expected.items())


@dataclass(kw_only=True, slots=True)
class Settings(Configurable.Config):
    """As torchtitan's Trainer.Config has its model."""

    model_spec: ModelSpec


def test_torchtitans_config_can_name_it() -> None:
    spec = llama3.model_registry("debugmodel")
    kept = spec.model  # the trainer builds what it took before the overrides
    lines = apply_overrides(OverrideConfig(imports=[NAME]), Settings(model_spec=spec))
    assert len(lines) == 1
    assert spec.model is kept
    assert all(type(layer.attention.inner_attention) is DashDocumentAttention.Config for layer in kept.layers)
    assert not list(kept.traverse(FlexAttention.Config))


def test_configs_keep_what_they_had() -> None:
    config = small(llama3, "varlen")
    for layer in config.layers:
        layer.attention.inner_attention = VarlenAttention.Config(window_size=(40, 0), param_init={"a": print})
    (inner, _) = (layer.attention.inner_attention for layer in enable(enable(config)).layers)
    assert (type(inner), inner.window_size, inner.param_init) == (DashDocumentAttention.Config, (40, 0), {"a": print})


def test_attention_without_documents() -> None:
    config = small(llama3, "varlen")
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    expected, found = (models.built(c)(*models.batch()) for c in (config, enable(config)))
    assert type(config.layers[0].attention.inner_attention) is DashScaledDotProductAttention.Config
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    inner = DashScaledDotProductAttention.Config().build()
    q = torch.randn(1, 40, 2, 16)
    both_ways = nn.functional.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3).transpose(1, 2)
    torch.testing.assert_close(inner(q, q, q, is_causal=False), both_ways)  # as Flux calls it
    with pytest.raises(ValueError, match="takes None as attention_masks; got Tensor"):
        inner(q, q, q, attention_masks=q)


@pytest.mark.parametrize(("package", "owner", "where"), [
    (gpt_oss, "GptOssModel", "layers.0.attention.inner_attention"),
    (muse_glimmer, "MuseGlimmerModel", "layers.0.attention.inner_attention"),
    (kimi_k2_7, "KimiK25Model", "vision_encoder.block.attn.inner_attention"),
])  # fmt: skip
def test_masks_that_are_not_known_raise(package: Any, owner: str, where: str) -> None:
    config = package.model_registry("debugmodel", attn_backend="flex").model
    before = list(config.traverse(FlexAttention.Config))
    with pytest.raises(ValueError, match=f"masks of torchtitan's Decoder only; {owner} makes its own for {where}"):
        enable(config)
    assert list(config.traverse(FlexAttention.Config)) == before  # nothing was changed


def test_other_attentions_raise() -> None:
    class Other(VarlenAttention):
        @dataclass(kw_only=True, slots=True)
        class Config(VarlenAttention.Config):
            pass

    config = small(llama3, "varlen")
    config.layers[1].attention.inner_attention = Other.Config()
    with pytest.raises(ValueError, match=r"does not know .*Other\.Config at layers\.1\.attention\.inner_attention"):
        enable(config)
    with pytest.raises(ValueError, match=r"found no attention of torchtitan in Module\.Config"):
        enable(Module.Config())


def test_what_a_layer_asks_for_raises() -> None:
    net: Any = models.built(enable(small(llama3, "varlen")))
    inner, q = net.layers["0"].attention.inner_attention, torch.randn(1, 40, 2, 16)
    with pytest.raises(ValueError, match="takes torchtitan's VarlenMetadata as attention_masks; got NoneType"):
        inner(q, q, q, attention_masks=None)
    with pytest.raises(ValueError, match="does not support score_mod"):
        inner(q, q, q, attention_masks=None, score_mod=print)


def test_ranks_know_their_heads() -> None:
    def parallelized(**changes: Any) -> Any:
        inner = DashDocumentAttention.Config().build()
        mesh = SimpleNamespace(get_local_rank=lambda: 3)
        inner.parallelize(SimpleNamespace(**{"cp_enabled": False, "get_optional_mesh": {"tp": mesh}.get} | changes))
        return inner

    assert parallelized().head_offset(torch.empty(1, 8, 2, 16)) == 6
    assert parallelized(get_optional_mesh=lambda _: None).head_offset(torch.empty(1, 8, 2, 16)) == 0
    with pytest.raises(ValueError, match="does not support torchtitan's context parallelism: context_parallel_degree must be 1"):
        parallelized(cp_enabled=True)


@pytest.mark.exhaustive
def test_tensor_parallel_ranks_keep_the_bits_of_the_whole_model() -> None:
    first, second = run_processes(models.sharded_llama, 2)
    for rank in (first, second):
        assert rank["offset"] == [True]
        assert rank["same_inputs"] == rank["same"] == [True] * 3
        assert not all(rank["same_elsewhere"])  # the control: as if its heads were one further


def test_torchtitans_own_checks_know_it() -> None:
    """They refuse context parallelism by these classes, and make the masks by these configs."""
    assert issubclass(DashDocumentAttention, VarlenAttention)
    assert issubclass(DashDocumentAttention.Config, VarlenAttention.Config)
    assert issubclass(DashScaledDotProductAttention, ScaledDotProductAttention)
