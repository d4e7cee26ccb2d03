"""transformers models with attn_implementation="dash_attn": eager's values, the same bits in every run, clear refusals."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from dash_attn import Causal, Documents, Full, Mask, Prefix, Window, flash_attn_func, flash_attn_varlen_func  # noqa: E402
from dash_attn.integrations import _documents, huggingface  # noqa: E402
from dash_attn.integrations._layer_mask import LayerMask  # noqa: E402
from dash_attn.integrations._mask_functions import mask_of_pattern, read_causal  # noqa: E402
from dense import element_mask, largest_error, random_inputs  # noqa: E402
from hf_models import CONFIGS, PACKED, SIZES, TOKENS, model_of, step  # noqa: E402


@pytest.fixture(autouse=True)
def _registered() -> None:
    huggingface.enable()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_training_step_matches_eager(name: str) -> None:
    ours, eager = step(model_of(name, "dash_attn")), step(model_of(name, "eager"))
    for mine, theirs in zip(ours, eager, strict=True):
        assert largest_error(mine, theirs) < 1e-7  # transformers takes norms and rotary angles in single precision


@pytest.mark.parametrize("name", CONFIGS)
def test_error_is_at_most_twice_eagers(name: str) -> None:
    truth = step(model_of(name, "eager"))
    ours, eager = (step(model_of(name, kind, torch.float32)) for kind in ("dash_attn", "eager"))
    for mine, theirs, exact in zip(ours, eager, truth, strict=True):
        floor = 16 * torch.finfo(torch.float32).eps * max(1.0, exact.abs().max().item())
        assert largest_error(mine, exact) <= 2 * largest_error(theirs, exact) + floor


@pytest.mark.parametrize("name", CONFIGS)
def test_two_runs_have_the_same_bits(name: str) -> None:
    first, second = (step(model_of(name, "dash_attn", torch.float32)) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_the_window_matters() -> None:
    """The control of the tests above: without its window the model says something else."""
    model = model_of("mistral", "dash_attn")
    with_window = model(input_ids=TOKENS).logits
    model.config.sliding_window = None
    assert largest_error(model(input_ids=TOKENS).logits, with_window) > 1e-3


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_documents_do_not_see_each_other(name: str, use_cache: bool) -> None:
    model = model_of(name, "dash_attn")
    tokens = TOKENS[:1]
    packed = model(input_ids=tokens, position_ids=PACKED, use_cache=use_cache).logits
    alone = [model(input_ids=part).logits for part in tokens.split([70, 1, 79], 1)]
    assert largest_error(packed, torch.cat(alone, 1)) < 1e-7
    assert largest_error(model(input_ids=tokens).logits, packed) > 1e-3


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_documents_match_eager(name: str) -> None:
    """Also under a sliding window, and with other documents in each row of a batch."""
    rows = torch.cat([PACKED, torch.cat([torch.arange(n) for n in (20, 130)])[None]])
    for tokens, positions in ((TOKENS[:1], PACKED), (TOKENS, rows)):
        ours, eager = (step(model_of(name, kind), tokens, position_ids=positions) for kind in ("dash_attn", "eager"))
        for mine, theirs in zip(ours, eager, strict=True):
            assert largest_error(mine, theirs) < 1e-7


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_lengths_from_the_collator_are_position_ids(name: str) -> None:
    """DataCollatorWithFlattening gives cu_seq_lens beside position_ids; either alone means the same."""
    samples = [{"input_ids": part} for part in TOKENS[0].split([70, 1, 79])]
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = dict(collate(samples))
    both = model_of(name, "dash_attn", torch.float32)(**batch).logits
    by_positions = model_of(name, "dash_attn", torch.float32)(input_ids=batch["input_ids"], position_ids=PACKED).logits
    assert torch.equal(both, by_positions)
    # Lengths win: these position_ids are for rotary angles only, and say nothing of documents.
    del batch["position_ids"]
    by_lengths = model_of(name, "dash_attn", torch.float64)(**batch).logits
    plain = model_of(name, "dash_attn", torch.float64)(input_ids=batch["input_ids"]).logits
    assert largest_error(by_lengths[:, :70], plain[:, :70]) < 1e-7
    assert largest_error(by_lengths[:, 70:], plain[:, 70:]) > 1e-3


def test_the_same_position_ids_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    original = _documents._offsets_of_positions
    monkeypatch.setattr(_documents, "_offsets_of_positions", lambda *given: reads.append(given) or original(*given))
    reader, positions = _documents.PositionReader(), PACKED.clone()
    first = reader.offsets(positions, 1, 150)
    assert reader.offsets(positions, 1, 150) is first
    assert first.cu_seqlens_q.tolist() == [0, 70, 71, 150]
    positions[0, 100:] = torch.arange(50)  # changed in place
    assert reader.offsets(positions, 1, 150).cu_seqlens_q.tolist() == [0, 70, 71, 100, 150]
    assert reader.offsets(torch.arange(9)[None], 1, 9) is None
    assert len(reads) == 3


def gpt_oss(implementation: str, sink: float) -> Any:
    torch.manual_seed(0)
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = transformers.GptOssConfig(**SIZES, **experts, head_dim=8, sliding_window=40)
    chosen = {"attn_implementation": implementation, "experts_implementation": "eager", "dtype": torch.float64}
    model = transformers.AutoModelForCausalLM.from_config(config, **chosen)
    for layer in model.model.layers:
        layer.self_attn.sinks.data = torch.linspace(-1, sink, 4, dtype=torch.float64)
    return model


def test_attention_sinks_of_gpt_oss() -> None:
    ours, eager = step(gpt_oss("dash_attn", 2.0)), step(gpt_oss("eager", 2.0))
    for mine, theirs in zip(ours, eager, strict=True):
        assert largest_error(mine, theirs) < 1e-7
    assert largest_error(step(gpt_oss("dash_attn", 3.0))[0], ours[0]) > 1e-3  # the control: sinks matter


def test_packed_documents_of_gpt_oss() -> None:
    """transformers does not look for documents here, so eager mixes them; position_ids still reach us."""
    model, tokens = gpt_oss("dash_attn", 2.0), TOKENS[:1]
    alone = [model(input_ids=part).logits for part in tokens.split([70, 1, 79], 1)]
    assert largest_error(model(input_ids=tokens, position_ids=PACKED).logits, torch.cat(alone, 1)) < 1e-7


@torch.no_grad()
def test_decoding_with_a_cache_matches_one_pass() -> None:
    for name in ("llama", "mistral"):
        model = model_of(name, "dash_attn").eval()
        whole = model(input_ids=TOKENS).logits
        prompt = model(input_ids=TOKENS[:, :100], use_cache=True)
        rest = [model(input_ids=TOKENS[:, 100:140], past_key_values=prompt.past_key_values, use_cache=True)]
        rest += [model(input_ids=TOKENS[:, i : i + 1], past_key_values=prompt.past_key_values, use_cache=True) for i in range(140, 150)]
        assert largest_error(torch.cat([prompt.logits, *(r.logits for r in rest)], 1), whole) < 1e-7


def test_padding_of_ones_is_no_padding() -> None:
    model = model_of("llama", "dash_attn")
    assert torch.equal(model(input_ids=TOKENS, attention_mask=torch.ones_like(TOKENS)).logits, model(input_ids=TOKENS).logits)


def test_rows_of_a_batch_may_hold_other_documents() -> None:
    model = model_of("llama", "dash_attn", torch.float32)
    together = model(input_ids=TOKENS, position_ids=torch.cat([PACKED, torch.arange(150)[None]])).logits
    assert torch.equal(together[:1], model(input_ids=TOKENS[:1], position_ids=PACKED).logits)
    assert torch.equal(together[1:], model(input_ids=TOKENS[1:]).logits)
    equal = model(input_ids=TOKENS, position_ids=PACKED).logits  # one row of positions for all
    assert torch.equal(equal[:1], together[:1])


def own(mask: Mask) -> LayerMask:
    return LayerMask(mask, (90, 90))


def call(**arguments: Any) -> Tensor:
    """The attention function alone, on 2 query and 1 KV heads."""
    q, k, v = (x.transpose(1, 2) for x in random_inputs(90, 90, (2, 1), 8)[:3])
    out, weights = huggingface.attention(nn.Module(), q, k, v, **{"attention_mask": own(Causal()), **arguments})
    assert weights is None
    return out


POSITIONS = torch.arange(90)[None]
CALLS: list[tuple[dict[str, Any], Mask]] = [
    ({}, Causal()),
    ({"attention_mask": None, "is_causal": False}, Full()),
    ({"sliding_window": 20, "attention_mask": own(Window(19, 0))}, Window(19, 0)),
    ({"sliding_window": 90}, Causal()),
    ({"attention_mask": own(Window(5, 5))}, Window(5, 5)),
    ({"position_ids": POSITIONS}, Causal()),
    ({"position_ids": POSITIONS * 3}, Causal()),  # skips, and never goes back
    ({"position_ids": POSITIONS % 30, "attention_mask": own(Full())}, Full()),
    (dict.fromkeys(huggingface.WITHOUT_EFFECT, 1), Causal()),
    ({"output_attentions": False, "position_bias": None}, Causal()),
]


@pytest.mark.parametrize(("arguments", "mask"), CALLS, ids=[str(sorted(c)) + str(m) for c, m in CALLS])
def test_what_the_arguments_of_a_call_mean(arguments: dict[str, Any], mask: Mask) -> None:
    q, k, v, _ = random_inputs(90, 90, (2, 1), 8)
    assert torch.equal(call(scaling=0.4, softcap=3.0, **arguments), flash_attn_func(q, k, v, softmax_scale=0.4, softcap=3.0, mask=mask))


THIRTY = torch.tensor([0, 30, 60, 90], dtype=torch.int32)
LENGTHS = {"cu_seq_lens_q": THIRTY, "cu_seq_lens_k": THIRTY, "max_length_q": 30, "max_length_k": 30}
PACKED_CALLS: list[tuple[dict[str, Any], Mask]] = [
    ({"position_ids": POSITIONS % 30}, Causal()),
    ({"position_ids": POSITIONS % 30 + 500}, Causal()),  # the middle of longer documents
    ({"position_ids": POSITIONS % 30, "attention_mask": own(Window(8, 0))}, Window(8, 0)),
    (LENGTHS, Causal()),
    ({**LENGTHS, "cu_seq_lens_q": THIRTY.long(), "attention_mask": own(Window(8, 0))}, Window(8, 0)),
    ({**LENGTHS, "position_ids": POSITIONS}, Causal()),
    ({**LENGTHS, "attention_mask": None, "is_causal": False}, Full()),
    ({**LENGTHS, "attention_mask": None, "is_causal": False, "s_aux": torch.tensor([0.5, -1.0])}, Full()),
]


@pytest.mark.parametrize(("arguments", "mask"), PACKED_CALLS, ids=[str(sorted(c)) + str(m) for c, m in PACKED_CALLS])
def test_what_the_arguments_of_a_packed_call_mean(arguments: dict[str, Any], mask: Mask) -> None:
    q, k, v, _ = random_inputs(90, 90, (2, 1), 8)
    sinks = arguments.get("s_aux")
    parts = zip(q.split(30, 1), k.split(30, 1), v.split(30, 1), strict=True)
    alone = [flash_attn_func(*part, softmax_scale=0.4, softcap=3.0, mask=mask, sinks=sinks) for part in parts]
    assert torch.equal(call(scaling=0.4, softcap=3.0, **arguments), torch.cat(alone, 1))


@pytest.mark.parametrize("arguments", [{}, LENGTHS], ids=["dense", "packed"])
def test_dropout_has_seeds_of_the_generator(arguments: dict[str, Any]) -> None:
    q, k, v, _ = random_inputs(90, 90, (2, 1), 8)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(call(dropout=0.3, **arguments))
    torch.manual_seed(1)
    if arguments:
        tokens, sizes = (x[0] for x in (q, k, v)), (THIRTY, THIRTY, 30, 30)
        expected = flash_attn_varlen_func(*tokens, *sizes, 0.3, causal=True)[None]
    else:
        expected = flash_attn_func(q, k, v, 0.3, causal=True)
    assert torch.equal(runs[0], expected)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_a_cache_is_attended_without_dropout() -> None:
    q, k, v, _ = random_inputs(1, 90, (2, 1), 8)
    with pytest.raises(ValueError, match=r"no attention dropout for keys of a cache; Module asks for 0\.1\. Call model\.eval\(\)"):
        huggingface.attention(nn.Module(), *(x.transpose(1, 2) for x in (q, k, v)), LayerMask(Causal(), (1, 90)), dropout=0.1)


UNCLEAR = r"cannot tell documents by position_ids that repeat, or skip and go back"
BAD_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dropout": 1.0}, ValueError, r"dropout_p must be 0, or from 1/65536 to 1 - 1/65536; got 1.0"),
    ({"output_attentions": True}, ValueError, r"does not support output_attentions=True, which Module was given"),
    ({"position_bias": torch.zeros(2)}, ValueError, r"does not support position_bias \(a Tensor\)"),
    (
        {"block_indices": torch.zeros(2), "top": 3},
        ValueError,
        r"does not support block_indices \(a Tensor\), top=3, which Module was given",
    ),
    ({"head_mask": False}, ValueError, r"does not support head_mask=False"),
    ({"attention_mask": None}, ValueError, r"got no mask from Module \(is_causal=None, sliding_window=None\)"),
    ({"attention_mask": None, "is_causal": True}, ValueError, r"got no mask from Module \(is_causal=True"),
    ({"attention_mask": None, "is_causal": False, "sliding_window": 20}, ValueError, r"got no mask from Module .*sliding_window=20"),
    ({"attention_mask": Causal()}, ValueError, r"takes an attention_mask that is 2-d, 4-d .* or None; Module got a Causal"),
    (
        {"attention_mask": torch.ones(2, 90, 90).bool()},
        ValueError,
        r"2-d, 4-d .* or None; Module got a 3-d",
    ),
    (
        {"attention_mask": LayerMask(Causal(), (90, 80))},
        NotImplementedError,
        r"a mask of 90 queries and 80 keys .*has 90 queries and 90 keys",
    ),
    ({"is_causal": False}, ValueError, r"is_causal=False with a causal mask"),
    ({"sliding_window": 20}, ValueError, r"sliding_window=20 with a causal mask that has no window"),
    ({"position_ids": POSITIONS // 2}, ValueError, UNCLEAR),
    ({"position_ids": POSITIONS * 0}, ValueError, UNCLEAR),
    ({"position_ids": POSITIONS % 30 * 2}, ValueError, UNCLEAR),
    (
        {"position_ids": POSITIONS.expand(2, -1) % 30},
        ValueError,
        r"one row, or one for each of the 1 sequences; got shape \(2, 90\)",
    ),
    ({"cu_seq_lens_q": THIRTY}, ValueError, r"need all of cu_seq_lens_q, .*max_length_k; got only cu_seq_lens_q"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_CALLS, ids=[str(number) for number in range(len(BAD_CALLS))])
def test_what_a_call_refuses(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(**arguments)


def test_mask_functions_are_read_off() -> None:
    masks = transformers.masking_utils
    documents = torch.tensor([[0, 0, 1, 1, 1, 2]])
    window, packed = masks.sliding_window_causal_mask_function(4), masks.packed_sequence_mask_function(documents)
    assert read_causal(masks.causal_mask_function) == (None, None)
    assert read_causal(window) == (4, None)
    assert read_causal(masks.and_masks(window, packed)) == (4, documents)
    unknown = (
        masks.bidirectional_mask_function,
        masks.sliding_window_overlay(4),  # a window alone looks ahead
        masks.and_masks(window, masks.sliding_window_overlay(3)),
        masks.or_masks(masks.causal_mask_function, packed),
        masks.chunked_causal_mask_function(4, torch.zeros(1)),
        lambda batch, head, q, kv: kv <= q,
    )
    assert [read_causal(function) for function in unknown] == [None] * len(unknown)


def pattern_of(kept: Tensor) -> Any:
    return lambda sequence, rows, columns: kept[rows.start : rows.stop, columns.start : columns.stop]


PATTERNS = [
    (Causal(), 300, 300),
    (Causal(), 40, 300),
    (Full(), 40, 300),
    (Window(30, 0), 300, 300),
    (Window(30, 7), 40, 300),
    (Documents((100, 1, 199)), 300, 300),
    (Documents((100, 1, 199), causal=False), 300, 300),
    (Prefix(70), 300, 300),
]


@pytest.mark.parametrize(("mask", "q_len", "kv_len"), PATTERNS, ids=str)
def test_patterns_are_recognised(mask: Mask, q_len: int, kv_len: int) -> None:
    assert mask_of_pattern(pattern_of(element_mask(mask, q_len, kv_len)), 2, q_len, kv_len) == mask


def test_patterns_that_have_no_name() -> None:
    gaps, uneven = (torch.tensor(np.tri(300, dtype=bool)) for _ in range(2))
    gaps[200, 50] = False
    uneven[200, :50] = False
    assert mask_of_pattern(pattern_of(gaps), 1, 300, 300) is None
    assert mask_of_pattern(pattern_of(uneven), 1, 300, 300) is None


def test_unaligned_queries_are_refused() -> None:
    sizes = {"batch_size": 1, "q_length": 4, "kv_length": 8}
    with pytest.raises(NotImplementedError, match="got positions 9 and 7"):
        huggingface.mask_for(**sizes, q_offset=6)
    assert huggingface.mask_for(**sizes, q_offset=4).mask == Causal()
    assert [huggingface.mask_for(**sizes, q_offset=offset).keys for offset in (0, 4)] == [4, 8], "of a static cache those in use"


def test_register_says_what_is_missing_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="transformers"):
        huggingface.enable()
