"""Every language model of transformers: eager's logits and gradients, no look ahead, or an error of ours. Nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from dash_attn.integrations import huggingface  # noqa: E402
from model_sweep import RECORD, SIDES, logits, outcome, recorded, step  # noqa: E402
from sweep_models import (  # noqa: E402
    NAMES,
    TOLERANCE,
    Outcome,
    architectures,
    build,
    quiet,
    tokens,
)

# The best known, and one of every way in which models went wrong in silence.
WELL_KNOWN = {
    "causal": """
        llama llama4_text mistral ministral3 mixtral qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next gemma gemma2 gemma3_text phi phi3 gpt_oss
        gpt2 gpt_neox opt bart olmo2 deepseek_v3 glm4 granite smollm3 cohere2 starcoder2 stablelm jamba
        bloom falcon codegen xlm openai-gpt mpt minimax_m3_vl_text deepseek_v4
    """,
    "masked": "bert roberta xlm-roberta distilbert electra albert modernbert deberta-v2 esm big_bird",
    "encoder-decoder": "bart t5 t5gemma t5gemma2 bert2gpt2 speech_to_text whisper",
}
SHORT = [(kind, name) for kind, names in WELL_KNOWN.items() for name in names.split()]
RECORDED: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
SAME_VERSION = RECORDED["transformers"] == transformers.__version__


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quiet()


def assert_expected(kind: str, model_type: str, side: str = "") -> None:
    found = outcome(kind, model_type, side)
    assert found.status != "wrong", found.detail
    if SAME_VERSION:
        assert found == recorded(RECORDED, kind, model_type, side), (
            "docs/models.md is out of date: run `python tools/model_sweep.py` and `make pages`"
        )


@pytest.mark.parametrize(("kind", "model_type"), SHORT)
def test_a_well_known_model_matches_eager_or_raises(kind: str, model_type: str) -> None:
    assert_expected(kind, model_type)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("kind", "model_type"), SHORT)
def test_a_well_known_model_takes_padding_or_raises(kind: str, model_type: str, side: str) -> None:
    assert_expected(kind, model_type, side)


@pytest.mark.exhaustive
@pytest.mark.parametrize("side", ["", *SIDES])
@pytest.mark.parametrize(("kind", "model_type"), [pair for pair in architectures() if pair not in SHORT])
def test_every_model_matches_eager_or_raises(kind: str, model_type: str, side: str) -> None:
    assert_expected(kind, model_type, side)


@pytest.mark.skipif(not SAME_VERSION, reason="the record is of another version of transformers")
def test_the_record_has_every_model_and_none_is_wrong() -> None:
    assert {(kind, name) for kind in NAMES for name in RECORDED[kind]} == set(architectures())
    for side in ("", *SIDES):
        found = [recorded(RECORDED, *model, side).status for model in architectures()]
        assert set(found) <= {"matches", "refused", "no comparison"}
        assert found.count("no comparison") <= 10


def test_the_sweep_sees_a_missing_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with the mask that was given before, plain attention, the same comparison fails."""
    monkeypatch.setattr(huggingface, "Causal", huggingface.Full)
    found = outcome("causal", "llama")
    assert found.status == "wrong"
    assert "off by" in found.detail


@pytest.mark.parametrize("side", SIDES)
def test_the_sweep_sees_padding_that_is_attended(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    """The control: a causal model does not look at what is padded behind its tokens, but one that looks ahead does."""
    monkeypatch.setattr(huggingface, "known_padding", lambda *given: "none")
    found = outcome("causal" if side == "left" else "masked", "llama" if side == "left" else "bert", side)
    assert found.status == "wrong"
    assert "off by" in found.detail


def test_the_sweep_sees_attention_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: unchecked, a model that ignores the setting is not taken for one that works."""
    monkeypatch.setattr("dash_attn.integrations._model_check._check_one", lambda model: None)
    monkeypatch.setattr("dash_attn.integrations._model_check._is_to_be_watched", lambda model: False)
    assert outcome("causal", "openai-gpt") == Outcome("wrong", "dash_attn was not called")


ODD_POSITIONS = {
    "skip": torch.cat([torch.arange(20), torch.arange(20) + 70]),
    "repeat": torch.arange(40) // 2,
    "decrease": torch.arange(40).flip(0),
    "zeros": torch.zeros(40, dtype=torch.long),
    "packed": torch.cat([torch.arange(15), torch.arange(25)]),
}


LOOKED_AT = ("llama", "mistral", "qwen2_moe", "gemma3_text", "gpt_neox", "phi3")  # create_causal_mask gets position_ids
NOT_LOOKED_AT = ("opt",)  # it does not, so that documents are mixed in eager


@pytest.mark.parametrize("with_mask", [True, False], ids=["mask of ones", "no mask"])
@pytest.mark.parametrize("positions", ODD_POSITIONS)
@pytest.mark.parametrize("model_type", LOOKED_AT + NOT_LOOKED_AT)
def test_odd_positions_mean_what_they_mean_to_eager(model_type: str, positions: str, with_mask: bool) -> None:
    if model_type in NOT_LOOKED_AT and not with_mask and positions != "skip":
        pytest.skip("transformers has not looked; see the next test")
    huggingface.enable()
    found = []
    for implementation in ("dash_attn", "eager"):
        model = build("causal", model_type, implementation).eval()
        ids = tokens(model)
        arguments = {"position_ids": ODD_POSITIONS[positions].expand(len(ids), -1)}
        if with_mask:
            arguments["attention_mask"] = torch.ones_like(ids)
        found.append(logits(model, ids, **arguments))
    assert (found[0] - found[1]).abs().max() < TOLERANCE * found[1].abs().max()


@pytest.mark.parametrize("model_type", NOT_LOOKED_AT)
def test_where_transformers_does_not_look_positions_are_documents_or_refused(model_type: str) -> None:
    huggingface.enable()
    model = build("causal", model_type, "dash_attn").eval()
    ids = tokens(model)
    packed = logits(model, ids, position_ids=ODD_POSITIONS["packed"].expand(len(ids), -1))
    alone = torch.cat([logits(model, part) for part in ids.split([15, 25], 1)], 1)
    assert (packed - alone).abs().max() < TOLERANCE * alone.abs().max()
    for positions in ("repeat", "decrease", "zeros"):
        with pytest.raises(ValueError, match="cannot tell documents by position_ids"):
            logits(model, ids, position_ids=ODD_POSITIONS[positions].expand(len(ids), -1))


def test_steps_of_training_repeat_bit_by_bit() -> None:
    huggingface.enable()
    runs = []
    for _ in range(2):
        model = build("causal", "mixtral", "dash_attn")
        runs.append(step(model, tokens(model)))
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
