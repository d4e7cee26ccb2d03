"""Decoding of every language model of transformers: eager's tokens and logits from a cache, or an error of ours. Nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402

from dash_attn.integrations import huggingface  # noqa: E402
from dash_attn.integrations._layer_mask import places_in_cache  # noqa: E402
from model_sweep import RECORD, SOURCES, WAYS, decoded, decoding, unusual  # noqa: E402
from sweep_models import build, counted_calls, quiet  # noqa: E402

RECORDED: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
SAME_VERSION = RECORDED["transformers"] == transformers.__version__
MODELS = [(kind, name) for kind, names in RECORDED["decoding"].items() for name in names]
# Caches of all keys, of windows and of both, chunks, sinks, values of another head dim, states beside keys, masks of the model's own.
DECODERS = """
    llama mistral gemma2 gemma3_text gpt_oss llama4_text deepseek_v3 qwen3_next jamba zamba2 biogpt opt gpt2 bart bert moshi mllama
    hrm_text musicgen cohere2 falcon_h1 gemma4_unified whisper qwen2 qwen3 qwen3_moe mixtral phi phi3 gpt_neox olmo2 glm4 granite smollm3
    starcoder2 stablelm ministral3 ministral gemma qwen2_moe
"""
SHORT = [pair for pair in MODELS if pair[0] == "encoder-decoder" or pair[1] in DECODERS.split()]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quiet()


def assert_expected(kind: str, model_type: str) -> None:
    found = unusual(kind, decoding(kind, model_type))
    assert "wrong" not in {status for status, _ in found.values()}, found
    if SAME_VERSION:
        assert found == RECORDED["decoding"][kind][model_type], (
            "docs/models.md is out of date: run `python tools/model_sweep.py` and `make pages`"
        )


@pytest.mark.parametrize(("kind", "model_type"), SHORT)
def test_one_model_of_each_kind_decodes_as_eager_or_raises(kind: str, model_type: str) -> None:
    assert_expected(kind, model_type)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "model_type"), [pair for pair in MODELS if pair not in SHORT])
def test_every_model_decodes_as_eager_or_raises(kind: str, model_type: str) -> None:
    assert_expected(kind, model_type)


def test_the_record_has_every_model_that_matches_and_none_is_wrong() -> None:
    matching = [
        (kind, name) for kind in ("causal", "encoder-decoder") for name, (status, _) in RECORDED[kind].items() if status == "matches"
    ]
    assert matching == MODELS
    assert set(DECODERS.split()) <= {name for _, name in SHORT}
    unlike = [found for kind in RECORDED["decoding"].values() for found in kind.values() if found]
    assert {status for found in unlike for status, _ in found.values()} <= {"refused", "no comparison"}
    assert len(unlike) < 10


@pytest.mark.parametrize("model_type", ["bart", "bert2gpt2"])
def test_the_sweep_sees_a_decoder_that_does_not_look_at_its_source(monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    """The control: the last token of the source taken for the query, as it was."""
    columns = huggingface.places_of_all_keys
    monkeypatch.setattr(huggingface, "places_of_all_keys", lambda kept: places_in_cache(kept, 1, 0, kept.shape[1]))
    found = unusual("encoder-decoder", decoding("encoder-decoder", model_type))
    assert {way: status for way, (status, _) in found.items()} == dict.fromkeys(("right", "beams", "static", "prompt"), "wrong")
    monkeypatch.setattr(huggingface, "places_of_all_keys", columns)
    assert unusual("encoder-decoder", decoding("encoder-decoder", model_type)) == {}


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_the_sweep_sees_padding_that_is_attended(monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    monkeypatch.setattr(huggingface, "places_in_cache", lambda *given: None)
    found = unusual("causal", decoding("causal", model_type))
    assert {way for way, (status, _) in found.items() if status == "wrong"} >= {"left", "empty"}


@pytest.mark.parametrize(
    ("kind", "model_type"), [("causal", "llama"), ("causal", "mistral"), ("causal", "biogpt"), ("encoder-decoder", "bart")]
)
def test_where_only_the_device_knows_the_padding(monkeypatch: pytest.MonkeyPatch, kind: str, model_type: str) -> None:
    """As on a GPU: every mask may have padding, and nobody looks."""
    monkeypatch.setattr(huggingface, "known_padding", lambda *given: "unknown")
    found = decoding(kind, model_type)
    assert {way for way, one in found.items() if one.status != "matches"} == ({"right"} if kind == "causal" else set())
    assert kind != "causal" or "cache_leftpad must be between 0 and cache_seqlens; got -1" in found["right"].detail, (
        "a kernel says so there"
    )


@pytest.mark.parametrize("way", ["right", "beams", "static"])
@pytest.mark.parametrize("model_type", ["bart", "t5gemma", "bert2gpt2"])
def test_steps_run_in_the_kernel_for_caches(model_type: str, way: str) -> None:
    """Of two layers self attention and cross attention, in every step. The first token has no keys but its own."""
    huggingface.enable()
    model = build("encoder-decoder", model_type, "dash_attn")
    with counted_calls() as calls, torch.no_grad():
        decoded(model, *SOURCES[way])
    assert calls.count("flash_attn_with_kvcache") == 5 * 2 + 4 * 2


def test_steps_of_padded_rows_run_in_the_kernel_for_caches() -> None:
    huggingface.enable()
    model = build("causal", "llama", "dash_attn")
    with counted_calls() as calls:
        decoded(model, *WAYS["empty"])
    assert calls == ["flash_attn_varlen_func"] * 2 + ["flash_attn_with_kvcache"] * 4 * 2
