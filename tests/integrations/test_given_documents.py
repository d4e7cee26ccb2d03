"""Documents in a row of a transformers model: what the model is given counts, whatever it hands on to its attention."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from dash_attn import Documents  # noqa: E402
from dash_attn.integrations import _documents, huggingface  # noqa: E402
from dash_attn.libraries import numbers  # noqa: E402
from sweep_models import LENGTH, NAMES, build, changed, outcome_of, quiet, tokens  # noqa: E402

FIRST = 15  # tokens of the first document
PACKED = torch.cat([torch.arange(FIRST), torch.arange(LENGTH - FIRST)])[None]
ENDS = torch.tensor([0, FIRST, LENGTH, LENGTH + FIRST, 2 * LENGTH], dtype=torch.int32)
LENGTHS = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": LENGTH - FIRST, "max_length_k": LENGTH - FIRST}
# Whose layers do not hand position_ids on (biogpt makes a mask of ones, too), or drop cu_seq_lens_q; the others do.
KEEP_POSITIONS = ["ministral3", "gpt_bigcode", "persimmon", "ctrl", "fuyu", "cohere_compass_text", "whisper", "biogpt"]
DROP_LENGTHS = ["nemotron", "stablelm"]
SHORT = [*KEEP_POSITIONS, *DROP_LENGTHS, "llama", "opt", "gpt_oss", "qwen3_next"]
GIVEN: dict[str, dict[str, Any]] = {
    "positions": {"position_ids": PACKED},
    "positions without a cache": {"position_ids": PACKED, "use_cache": False},
    "lengths": {**LENGTHS, "use_cache": False},
}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quiet()
    huggingface.enable()


IDS = torch.randint(16, 80, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def moved(call: Callable[..., Any], **given: Any) -> float:
    """How far the second document's outputs move with the first, as a part of the largest."""
    with torch.no_grad():
        before, after = (call(input_ids=ids, **given)[0] for ids in (IDS, changed(IDS, 3)))
    return float((before - after)[:, FIRST:].abs().max() / before.abs().max())


def ends_of(mask: Any) -> list[int] | None:
    return ENDS.tolist() if isinstance(mask, Documents) and FIRST in accumulate(mask.lengths) else None


def seen_offsets(monkeypatch: pytest.MonkeyPatch) -> list[list[int] | None]:
    """Of every call of our attention; None for one without documents. Chunks of documents are documents in a mask."""
    seen: list[list[int] | None] = []
    packed, dense = huggingface.flash_attn_varlen_func, huggingface.flash_attn_func
    monkeypatch.setattr(huggingface, "flash_attn_func", lambda *args, **rest: (seen.append(ends_of(rest["mask"])), dense(*args, **rest))[1])
    monkeypatch.setattr(
        huggingface,
        "flash_attn_varlen_func",
        lambda *args, **rest: (seen.append(rest["cu_seqlens_q"].tolist()), packed(*args, **rest))[1],
    )
    return seen


def assert_apart(monkeypatch: pytest.MonkeyPatch, model_type: str, given: str, kind: str = "causal") -> None:
    """Layers that are not attention carry states over, with eager as with us: so it is the calls that are looked at."""
    seen = seen_offsets(monkeypatch)
    try:
        model = build(kind, model_type, "dash_attn").eval()
        model(input_ids=tokens(model), **GIVEN[given])
    except Exception as error:
        if outcome_of(error).status != "refused":
            with pytest.raises(type(error)):  # eager does not take this, either
                build(kind, model_type, "eager").eval()(input_ids=tokens(model), **GIVEN[given])
        return
    assert seen
    assert seen == [ENDS.tolist()] * len(seen)


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("model_type", SHORT)
def test_every_attention_call_of_a_model_keeps_documents_apart(monkeypatch: pytest.MonkeyPatch, model_type: str, given: str) -> None:
    assert_apart(monkeypatch, model_type, given)


@pytest.mark.exhaustive
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("model_type", [name for name in NAMES["causal"] if name not in SHORT])
def test_every_attention_call_of_every_model_keeps_documents_apart(monkeypatch: pytest.MonkeyPatch, model_type: str, given: str) -> None:
    assert_apart(monkeypatch, model_type, given)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", NAMES["masked"])
def test_every_attention_call_of_every_masked_model_is_given_the_lengths(monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    monkeypatch.setitem(GIVEN, "lengths", LENGTHS)
    assert_apart(monkeypatch, model_type, "lengths", "masked")


@pytest.mark.parametrize("model_type", KEEP_POSITIONS)
def test_a_document_does_not_see_the_one_before(model_type: str) -> None:
    model = build("causal", model_type, "dash_attn").eval()
    assert moved(model, position_ids=PACKED) == 0
    assert moved(model, position_ids=PACKED, attention_mask=torch.ones_like(IDS)) > 1e-4, "a mask says that each row is one document"
    assert moved(model) > 1e-4, "the control"


@pytest.mark.parametrize("model_type", ["biogpt", "ministral3"])
def test_a_forward_past_the_hooks_and_arguments_without_names(model_type: str) -> None:
    model = build("causal", model_type, "dash_attn").eval().base_model
    assert moved(model.forward, position_ids=PACKED) == 0
    if model_type == "ministral3":
        assert moved(lambda input_ids: model(input_ids, None, PACKED)) == 0
        assert moved(lambda input_ids: model(input_ids, torch.ones_like(IDS), PACKED)) > 1e-4


def test_where_only_the_device_knows_that_a_mask_is_of_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the mask that biogpt makes itself might be of padded rows."""
    monkeypatch.setattr(huggingface, "known_padding", lambda *given: "unknown")
    model = build("causal", "biogpt", "dash_attn").eval()
    assert moved(model, position_ids=PACKED) == 0
    assert moved(model) > 1e-4


def test_positions_are_read_once_per_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is waited for no more often than it was where the layers hand them on. With a mask nobody reads them."""
    read: list[Tensor] = []
    original = _documents._offsets_of_positions
    monkeypatch.setattr(_documents, "_offsets_of_positions", lambda *given: (read.append(given[0]), original(*given))[1])
    model, positions = build("causal", "persimmon", "dash_attn").eval(), PACKED.clone()
    model(input_ids=IDS, position_ids=positions)
    assert len(read) == 1
    model(input_ids=IDS, position_ids=positions, attention_mask=torch.ones_like(IDS))
    assert len(read) == 1


def test_a_note_lasts_as_long_as_the_forward() -> None:
    model = build("causal", "persimmon", "dash_attn").eval()
    seen: list[tuple[list[str], list[str]]] = []

    def look(*given: Any) -> None:
        other: list[str] = []
        thread = threading.Thread(target=lambda: other.extend(_documents.given_documents()))
        thread.start()
        thread.join()
        seen.append((list(_documents.given_documents()), other))

    handle = model.base_model.layers[0].register_forward_hook(look)
    model(input_ids=IDS, position_ids=PACKED)
    handle.remove()
    assert seen == [(["position_ids", "tokens", "has_cache"], [])], "and in its own thread"
    with pytest.raises(ValueError, match="cannot tell documents by position_ids"):
        model(input_ids=IDS, position_ids=PACKED // 2)
    assert not _documents.are_noted()
    assert moved(model) > 1e-4


def test_notes_of_models_in_models_add_up() -> None:
    """An outer model may drop what an inner one is not given, and make it a cache."""
    _documents._note({"cu_seq_lens_q": 1, "position_ids": 2, "has_cache": False})
    _documents._note({"position_ids": 3, "has_cache": True})
    assert _documents.given_documents() == {"cu_seq_lens_q": 1, "position_ids": 3, "has_cache": False}
    for _ in range(2):
        _documents._forget()
    assert _documents.given_documents() == {}


def test_models_with_another_implementation_note_nothing() -> None:
    build("causal", "llama", "dash_attn")  # its class notes from now on
    model = build("causal", "llama", "eager").eval()
    noted: list[bool] = []
    model.base_model.layers[0].register_forward_hook(lambda *given: noted.append(_documents.are_noted()))
    model(input_ids=IDS, position_ids=PACKED)
    assert noted == [False]


def test_lengths_that_a_layer_which_looks_ahead_is_not_handed_are_refused() -> None:
    made = huggingface.LayerMask(huggingface.Full(), (LENGTH, LENGTH))
    made.noted = {**LENGTHS, "tokens": 2 * LENGTH, "has_cache": False}
    made.model = "A model"
    q = torch.randn(2, 4, LENGTH, 8)
    with pytest.raises(ValueError, match="would mix documents: A model was given cu_seq_lens_q, and a layer that looks ahead was not"):
        huggingface.attention(torch.nn.Identity(), q, q, q, made)
    assert huggingface.attention(torch.nn.Identity(), q, q, q, made, **LENGTHS)[0].shape == (2, LENGTH, 4, 8)
    made.noted["tokens"] = 7  # of the model around it: this is a vision tower
    assert huggingface.attention(torch.nn.Identity(), q, q, q, made)[0].shape == (2, LENGTH, 4, 8)


@pytest.mark.parametrize("model_type", ["modernbert", pytest.param("ultrabert", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("positions", [PACKED, PACKED // 2], ids=["packed", "repeated"])
def test_positions_tell_no_documents_to_layers_that_look_ahead(model_type: str, positions: Tensor) -> None:
    """Windows that look ahead among them: half of the layers would keep documents apart."""
    ours, eager = (build("masked", model_type, name).eval()(input_ids=IDS, position_ids=positions)[0] for name in ("dash_attn", "eager"))
    torch.testing.assert_close(ours, eager)


@pytest.mark.skipif(numbers(transformers.__version__) < (5, 18), reason="its generate gives a mask of ones: each row is one document")
def test_tokens_are_not_generated_behind_packed_documents() -> None:
    model = build("causal", "llama", "dash_attn").eval()
    with pytest.raises(NotImplementedError, match="packed documents with a cache, whose next tokens would attend to all of them"):
        model.generate(IDS, position_ids=PACKED.expand(2, -1), max_new_tokens=2)
    model.generate(IDS, position_ids=torch.arange(LENGTH).expand(2, -1), max_new_tokens=2)


def test_positions_of_an_encoder_decoder_model_that_has_no_name_for_them() -> None:
    model = build("encoder-decoder", "bart", "dash_attn").eval()
    with pytest.raises(ValueError, match="whose position_ids these are: BartForConditionalGeneration does not take them by name"):
        model(input_ids=IDS, position_ids=PACKED)


def test_a_configuration_changed_by_hand_and_a_subclass() -> None:
    model = build("causal", "persimmon", "eager").eval()

    class Wrapped(type(model.base_model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    inner = Wrapped(model.config).to(torch.float64).eval()
    for one in (model, inner):
        one.config._attn_implementation = "dash_attn"
        assert moved(one, position_ids=PACKED) == 0
        assert moved(one) > 1e-4
    assert moved(lambda input_ids: inner(input_ids, None, PACKED)) == 0


def test_another_thread_may_ask_in_between() -> None:
    reader = _documents.PositionReader()
    found = reader.offsets(PACKED, 1, LENGTH)
    assert reader._last is not None
    key = reader._last[1]

    def meddling() -> Tensor:
        reader._last = (lambda: None, key, None)  # type: ignore[assignment]
        return PACKED

    reader._last = (meddling, key, found)  # type: ignore[assignment]
    assert reader.offsets(PACKED, 1, LENGTH) is found is not None


@pytest.mark.parametrize("rows", [3, 4])
def test_three_positions_per_token_that_go_back_are_refused(rows: int) -> None:
    """For time, height and width; a fourth may be the text's, which tells documents where the model hands it on."""
    model = build("causal", "cohere_compass_text", "dash_attn").eval()
    with pytest.raises(ValueError, match=f"by position_ids that go back and are {rows} per token"):
        model(input_ids=IDS, position_ids=PACKED.expand(rows, 2, -1))
    model(input_ids=IDS, position_ids=torch.arange(LENGTH).expand(rows, 2, -1))
    if rows == 4:
        assert moved(model, position_ids=PACKED.expand(rows, 2, -1), use_cache=False) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", ["biogpt", "ministral3"])
def test_compiled_models_keep_documents_apart_or_say_that_they_break(model_type: str) -> None:
    model = build("causal", model_type, "dash_attn").eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    assert moved(compiled, position_ids=PACKED) == 0
    assert moved(compiled, attention_mask=torch.ones_like(IDS)) > 1e-4
    assert moved(compiled, position_ids=PACKED) == 0
    torch._dynamo.reset()
    whole = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="dash_attn reads position_ids"):
        whole(input_ids=IDS, position_ids=PACKED)
    assert moved(whole, position_ids=PACKED, attention_mask=torch.ones_like(IDS)) > 1e-4
