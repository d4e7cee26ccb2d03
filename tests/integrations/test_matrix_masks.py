"""Masks of transformers that are functions or tensors: by name where one says the same, as matrices where none does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from dash_attn.integrations import _mask_functions, huggingface  # noqa: E402
from dash_attn.integrations._layer_mask import LayerMask  # noqa: E402
from dash_attn.libraries import numbers  # noqa: E402
from dense import largest_error, random_inputs, same_bits  # noqa: E402

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
WINDOWS = {**GROUPED, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
EYE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
LENGTH = 40
TOKENS = torch.randint(3, 60, (2, LENGTH), generator=torch.Generator().manual_seed(0))
ONES = torch.ones_like(TOKENS)


def cut(*places: int, row: int = 0) -> Tensor:
    kept = ONES.clone()
    kept[row, slice(*places)] = 0
    return kept


HOLE, LEFT, RIGHT = cut(10, 15), cut(9), cut(30, None)
IMAGES = torch.zeros_like(TOKENS)  # each row has one elsewhere
IMAGES[0, 5:12] = IMAGES[1, 20:29] = 1
PREFIX = 1 - IMAGES.new_ones(2, LENGTH).cumsum(1).le(12).long()
PACKED = torch.cat([torch.arange(15), torch.arange(LENGTH - 15)]).expand(2, -1)
UNEVEN = PREFIX.clone()
UNEVEN[1, 12:15] = 0


def gemma3(**choices: Any) -> Any:
    tokens = {"image_token_index": 63, "boi_token_index": 62, "eoi_token_index": 61, "mm_tokens_per_image": 4}
    return transformers.Gemma3Config(text_config=dict(WINDOWS), vision_config=dict(EYE), **tokens, **choices)


def paligemma(**choices: Any) -> Any:
    parts = {"text_config": {"model_type": "gemma", **GROUPED}, "vision_config": {"model_type": "siglip_vision_model", **EYE}}
    return transformers.PaliGemmaConfig(**parts, image_token_index=63, projection_dim=32, hidden_size=32, **choices)


MODELS: dict[str, tuple[str, Callable[..., Any]]] = {
    "embeddinggemma": (
        "Gemma3TextModel",
        lambda **choices: transformers.Gemma3TextConfig(**WINDOWS, use_bidirectional_attention=True, **choices),
    ),
    "gemma3": ("Gemma3ForConditionalGeneration", gemma3),
    "paligemma": ("PaliGemmaForConditionalGeneration", paligemma),
    "llama": ("LlamaForCausalLM", lambda **choices: transformers.LlamaConfig(**GROUPED, **choices)),
    "mistral": ("MistralForCausalLM", lambda **choices: transformers.MistralConfig(**GROUPED, sliding_window=16, **choices)),
    "bert": ("BertModel", lambda **choices: transformers.BertConfig(**SIZES, hidden_dropout_prob=0.0, **choices)),
}


def model_of(name: str, implementation: str, dtype: torch.dtype = torch.float64) -> Any:
    """With scores that are not nearly 0, where any mask is nearly right."""
    huggingface.enable()
    kind, configuration = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, kind)(configuration(attn_implementation=implementation)).to(dtype).eval()
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.15)
    return made


def result(model: Any, **inputs: Any) -> Tensor:
    found = model(input_ids=TOKENS, use_cache=False, **inputs)
    return found.logits if "logits" in found else found.last_hidden_state


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What layers were given, in words."""
    seen: set[str] = set()
    check = LayerMask.check
    monkeypatch.setattr(LayerMask, "check", lambda self, *lengths: (seen.add(self.in_words), check(self, *lengths))[1])
    return seen


CASES: list[tuple[str, dict[str, Any], set[str]]] = [
    ("embeddinggemma", {}, {"full", "window:8,8"}),
    ("embeddinggemma", {"attention_mask": ONES}, {"full", "window:8,8"}),
    ("embeddinggemma", {"attention_mask": HOLE}, {"a matrix"}),
    ("embeddinggemma", {"position_ids": PACKED}, {"a matrix", "documents-full:15,25"}),  # documents that transformers has found
    ("gemma3", {"attention_mask": ONES, "token_type_ids": IMAGES}, {"a matrix"}),
    ("gemma3", {"token_type_ids": IMAGES}, {"a matrix"}),
    ("paligemma", {"token_type_ids": PREFIX, "labels": TOKENS}, {"prefix:12"}),
    ("paligemma", {"attention_mask": LEFT, "token_type_ids": PREFIX, "labels": TOKENS}, {"a matrix"}),
    ("paligemma", {"attention_mask": ONES, "token_type_ids": UNEVEN, "labels": TOKENS}, {"a matrix"}),
    *((name, {"attention_mask": HOLE}, {"a matrix"}) for name in ("llama", "mistral", "bert")),
]


@pytest.mark.parametrize(("name", "inputs", "expected"), CASES, ids=[f"{name} {i}" for i, (name, *_) in enumerate(CASES)])
def test_models_match_eager(name: str, inputs: dict[str, Any], expected: set[str], masks: set[str]) -> None:
    """The token types of the control are others. Padded places mean nothing."""
    ours, eager = (model_of(name, implementation).train(name == "paligemma") for implementation in ("dash_attn", "eager"))
    kept = inputs.get("attention_mask", ONES).bool()
    found, theirs = result(ours, **inputs), result(eager, **inputs)
    assert masks == expected
    assert largest_error(found[kept], theirs[kept]) < 1e-5
    weights = [
        torch.autograd.grad(x[kept].square().mean(), model.get_input_embeddings().weight)[0]
        for x, model in ((found, ours), (theirs, eager))
    ]
    assert largest_error(*weights) < 1e-4
    if "token_type_ids" in inputs:
        others = {**inputs, "token_type_ids": inputs["token_type_ids"].roll(1, 0).roll(3, 1)}
        assert largest_error(result(ours, **others)[kept], theirs[kept]) > 1e-3
    if "attention_mask" in inputs and not kept.all():
        assert largest_error(result(ours, **{**inputs, "attention_mask": ONES})[kept], theirs[kept]) > 1e-3


@pytest.mark.parametrize("kept", [LEFT, RIGHT], ids=["left", "right"])
def test_padded_rows_of_a_bidirectional_gemma_have_the_bits_that_they_have_alone(kept: Tensor) -> None:
    model = model_of("embeddinggemma", "dash_attn", torch.float32)
    positions = (kept.cumsum(1) - 1).clamp(min=0)
    padded = result(model, attention_mask=kept, position_ids=positions)[0, kept[0].bool()]
    assert same_bits(padded, model(input_ids=TOKENS[:1, kept[0].bool()], use_cache=False).last_hidden_state[0])


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("llama", {"attention_mask": HOLE}),
        ("mistral", {"attention_mask": HOLE}),
        ("gemma3", {"attention_mask": ONES, "token_type_ids": IMAGES}),
        ("paligemma", {"attention_mask": ONES, "token_type_ids": PREFIX}),
    ],
    ids=["llama", "mistral", "gemma3", "paligemma"],
)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_is_as_in_eager(name: str, inputs: dict[str, Any], cache: str) -> None:
    choices = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "cache_implementation": cache}
    answer = {"return_dict_in_generate": True, "output_logits": True}
    made = [model_of(name, one).generate(TOKENS, **inputs, **choices, **answer) for one in ("dash_attn", "eager")]
    assert torch.equal(made[0].sequences, made[1].sequences)
    assert largest_error(*(torch.stack(one.logits) for one in made)) < 1e-5


def test_a_drafted_token_that_counts_as_padding() -> None:
    """Assisted generation: transformers takes a token for padding that equals the padding token. The window's cache has dropped keys."""
    kept = torch.ones(2, LENGTH + 3, dtype=torch.long)
    kept[0, -1] = 0
    found = []
    for implementation in ("dash_attn", "eager"):
        model = model_of("mistral", implementation)
        with torch.no_grad():
            cache = model(input_ids=TOKENS, attention_mask=ONES, use_cache=True).past_key_values
            found.append(model(input_ids=TOKENS[:, :3], attention_mask=kept, past_key_values=cache).logits)
    assert largest_error(found[0][:, :2], found[1][:, :2]) < 1e-5


class Layer(torch.nn.Module):
    is_causal = True


def attend(tensors: list[Tensor], mask: LayerMask | Tensor) -> Tensor:
    return huggingface.attention(Layer(), *tensors, mask)[0]


def tensors_of(q_len: int, kv_len: int) -> list[Tensor]:
    return [x.transpose(1, 2) for x in random_inputs(q_len, kv_len, (4, 2), 8, torch.float32, batch=2)[:3]]


def test_a_matrix_over_a_cache_that_dropped_keys_has_the_bits_of_the_whole() -> None:
    """Its tiles begin at position 0. The control: at the first key that is left."""
    q, k, v = tensors_of(300, 300)
    kept = torch.ones(300, 300).tril().bool() & ~torch.ones(300, 300).tril(-100).bool()
    kept[:, 250] = False
    kept = kept.expand(2, 1, 300, 300)
    whole = attend([q, k, v], kept)[:, -3:]
    first = 170
    left = [q[:, :, -3:], k[:, :, first:], v[:, :, first:]]
    made = LayerMask(kept[:, :, -3:, first:].contiguous(), (3, 130), first_position=first)
    assert same_bits(attend(left, made), whole)
    made.first_position = 0
    assert not same_bits(attend(left, made), whole)


def test_matrices_of_the_caller() -> None:
    """Those of 0 and -inf are the boolean ones. Other numbers, and those that learn, raise."""
    model = model_of("llama", "dash_attn")
    kept = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.5
    kept |= torch.eye(LENGTH).bool()
    numbers = torch.zeros(kept.shape, dtype=torch.float64).masked_fill(~kept, -torch.inf)
    found = result(model, attention_mask=kept)
    assert same_bits(found, result(model, attention_mask=numbers))
    assert largest_error(found, result(model_of("llama", "eager"), attention_mask=numbers)) < 1e-6
    assert largest_error(found, result(model)) > 1e-3
    for_all_queries = kept[:, :, :1] | torch.arange(LENGTH).eq(0)
    assert same_bits(result(model, attention_mask=for_all_queries), result(model, attention_mask=for_all_queries.expand_as(kept)))
    with pytest.raises(ValueError, match=r"-inf elsewhere; got -1\.79\d*e\+308"):
        result(model, attention_mask=numbers.clamp(min=torch.finfo(numbers.dtype).min))
    with pytest.raises(ValueError, match="a mask tensor gets no gradient"):
        result(model, attention_mask=numbers.requires_grad_())
    with pytest.raises(NotImplementedError, match=r"a mask of 40 queries and 40 keys .*; a layer has 39 queries and 39 keys"):
        model(input_ids=TOKENS[:, :39], attention_mask=kept, use_cache=False)


def test_documents_beside_a_matrix_are_refused() -> None:
    ends = torch.tensor([0, 11, LENGTH], dtype=torch.int32)
    named = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 29, "max_length_k": 29}
    kept = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match=r"supports documents with causal, .* masks; this one is a matrix"):
        model_of("llama", "dash_attn")(input_ids=TOKENS[:1], attention_mask=kept, use_cache=False, **named)


def test_functions_of_the_caller_are_asked_place_by_place() -> None:
    """Under vmap, as transformers asks them: they may branch on what they are given. Padding counts."""
    table = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) < 0.5

    def odd(batch: Any, head: Any, q: Tensor, k: Tensor) -> Tensor:
        assert q.ndim == k.ndim == 0
        return table[q, k] | (batch == 1)

    kept = torch.ones(2, 8, dtype=torch.long)
    kept[1, 3] = 0
    made = huggingface.mask_for(2, 8, 8, mask_function=odd, use_vmap=True, attention_mask=kept)
    assert torch.equal(made.mask[:, 0], torch.stack([table, kept[1].bool().expand(8, 8)]))
    assert huggingface.mask_for(2, 8, 8, mask_function=lambda b, h, q, k: k <= q, use_vmap=True).in_words == "causal"


LLAMA4 = {
    "attention_chunk_size": 16,
    "num_local_experts": 2,
    "intermediate_size_mlp": 64,
    "layer_types": ["chunked_attention", "full_attention"],
}


def test_documents_and_chunks_together() -> None:
    """Chunks count from the start of each document where transformers has seen the documents; elsewhere the error says so."""
    huggingface.enable()
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(**GROUPED, **LLAMA4, attn_implementation="dash_attn")
    model = transformers.Llama4ForCausalLM(config).double().eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.15)
    ends = torch.tensor([0, 11, LENGTH], dtype=torch.int32)
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 29, "max_length_k": 29}
    packed["position_ids"] = torch.cat([torch.arange(11), torch.arange(29)])[None]
    attended: list[Tensor] = []  # of the first layer: MKL's products behind it give a row other bits in a larger batch
    model.model.layers[0].self_attn.register_forward_hook(lambda module, given, out: attended.append(out[0]))
    together = model(input_ids=TOKENS[:1], use_cache=False, **packed).logits
    rows = model(input_ids=TOKENS, use_cache=False, position_ids=packed["position_ids"].expand(2, -1)).logits
    alone = model(input_ids=TOKENS[:, 11:]).logits
    model.set_attn_implementation("eager")
    eager = model(input_ids=TOKENS, use_cache=False, position_ids=packed["position_ids"].expand(2, -1)).logits
    model.set_attn_implementation("dash_attn")
    assert largest_error(rows, eager) < 1e-6
    assert largest_error(together, eager[:1]) < 1e-6
    assert same_bits(attended[1][:1], attended[0])
    if numbers(transformers.__version__) >= (5, 23):  # in 5.20 eager's chunks count from the start of the row
        assert largest_error(rows[:, 11:], alone) < 1e-6
    with pytest.raises(NotImplementedError, match=r"give position_ids, use_cache=False and no attention_mask beside cu_seq_lens_q"):
        model(input_ids=TOKENS[:1], use_cache=False, attention_mask=ONES[:1], **packed)


def test_the_comparison_sees_a_matrix_without_its_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the first test."""
    made = _mask_functions.matrix_of
    monkeypatch.setattr(huggingface, "matrix_of", lambda function, kept, *rest, **places: made(function, None, *rest, **places))
    found, theirs = (result(model_of("llama", one), attention_mask=HOLE)[HOLE.bool()] for one in ("dash_attn", "eager"))
    assert largest_error(found, theirs) > 1e-3


@pytest.mark.parametrize("attention_mask", [False, True])
@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(1, 0, 0), (0, 4, 4), (2, 0, 6)])
def test_without_a_token_there_is_no_pattern_to_read(batch: int, q_len: int, kv_len: int, attention_mask: bool) -> None:
    """Most models of transformers raise where they reshape no elements; what we are asked for is answered."""
    kept = torch.ones(batch, kv_len, dtype=torch.long) if attention_mask else None
    made = huggingface.mask_for(batch, q_len, kv_len, mask_function=lambda b, h, q, k: k <= q + 1, attention_mask=kept)
    q, k = torch.zeros(batch, 2, q_len, 8), torch.zeros(batch, 2, kv_len, 8)
    out, _ = huggingface.attention(torch.nn.Identity(), q, k, k, made)
    assert out.shape == (batch, q_len, 2, 8)
    assert not out.any()
