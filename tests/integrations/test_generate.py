"""`generate` and `generate_batch` of transformers: what attention gives in prefill, chunks of it and decode steps has the bits of the
training forward, given the same queries, keys and values. Tokens are eager's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from continuous_batching import batched_together, skip_without_pages  # noqa: E402
from dash_attn import Documents, flash_attn_func  # noqa: E402
from dash_attn.call.offsets import SequenceOffsets  # noqa: E402
from dash_attn.integrations import _caches, huggingface  # noqa: E402
from dash_attn.integrations._layer_mask import LayerMask, places_in_cache  # noqa: E402
from dense import same_bits  # noqa: E402
from model_sizes import SMALL  # noqa: E402
from recorded_attention import Recorder  # noqa: E402

SIZES = {**SMALL, "max_position_embeddings": 512, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
LAYERS = ["sliding_attention", "full_attention"]
WINDOW = 40
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=WINDOW, layer_types=LAYERS),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **SIZES, head_dim=16, sliding_window=WINDOW, layer_types=LAYERS, num_local_experts=2, num_experts_per_tok=1
    ),
}
PROMPT = torch.randint(1, 64, (2, 120), generator=torch.Generator().manual_seed(0))
WAYS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "chunks": {"prefill_chunk_size": 50},
    "static in chunks": {"cache_implementation": "static", "prefill_chunk_size": 50},
}


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    huggingface.enable()
    made, ours = Recorder(), ALL_ATTENTION_FUNCTIONS[huggingface.NAME]
    transformers.AttentionInterface.register(huggingface.NAME, made.attention)
    yield made
    transformers.AttentionInterface.register(huggingface.NAME, ours)


def by_eager(model: Any, prompt: Tensor = PROMPT, **choices: Any) -> Tensor:
    """Tokens to compare with. Some versions have a mistake of their own: 5.6 in look-ups, 5.17 in the masks of static chunks."""
    try:
        return sampled(model, prompt, **choices)
    except TypeError as error:
        pytest.skip(f"transformers {transformers.__version__} cannot do it with eager either: {str(error).splitlines()[0]}")


def model_of(name: str, implementation: str = "dash_attn", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=implementation, dtype=dtype).eval()


def sampled(model: Any, prompt: Tensor = PROMPT, **choices: Any) -> Tensor:
    choices = {"max_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(prompt), **choices}
    tokens: Tensor = model.generate(prompt, **choices)
    return tokens


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONFIGS)
def test_bits_are_those_of_training(name: str, way: str, recorder: Recorder) -> None:
    tokens = sampled(model_of(name), **WAYS[way])
    assert {recorder.length(*key) for key in recorder.chains} == {135}, "all tokens but the last were attended from"
    assert max(len(chunks) for chunks in recorder.chains.values()) == (18 if "chunks" in way else 16)
    assert recorder.differing() == []
    assert torch.equal(tokens, sampled(model_of(name, "eager"), **WAYS[way]))


def test_bits_in_bfloat16(recorder: Recorder) -> None:
    sampled(model_of("llama", dtype=torch.bfloat16), cache_implementation="static")
    assert recorder.differing() == []


def test_a_cache_that_does_not_say_what_it_dropped_has_other_bits(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of sliding caches: from token 128 on, 40 keys counted from 0 lie in one tile, and in training in two."""

    def from_zero(q: Tensor, k: Tensor, v: Tensor, given: LayerMask, options: Any) -> Tensor:
        given.first_position, given.places = 0, None  # versions that hand a mask of ones on have places
        return attend(q, k, v, given, options)

    attend = huggingface.attend_to_cache
    monkeypatch.setattr(huggingface, "attend_to_cache", from_zero)
    tokens = sampled(model_of("mistral"))
    assert len(recorder.differing()) == 4
    assert torch.equal(tokens, sampled(model_of("mistral", "eager"))), "values are right"


def test_sdpa_has_other_bits(recorder: Recorder) -> None:
    """The control of all: one query at a time and all at once, by PyTorch."""
    sampled(model_of("llama"))
    chunks = recorder.chains[0, 0]
    q, k, v = (torch.cat([getattr(chunk, name) for chunk in chunks], 1)[None] for name in "qkv")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    whole = sdpa(q, k, v, is_causal=True, enable_gqa=True)
    steps = torch.cat([sdpa(q[:, :, n : n + 1], k[:, :, : n + 1], v[:, :, : n + 1], enable_gqa=True) for n in range(q.shape[2])], 2)
    torch.testing.assert_close(steps, whole)
    assert not same_bits(steps, whole)


@pytest.mark.parametrize("choices", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_beams_and_speculation_choose_eagers_tokens(choices: dict[str, Any]) -> None:
    huggingface.enable()
    prompt = PROMPT[:1, :30].repeat(1, 3)
    expected = by_eager(model_of("llama", "eager"), prompt, **choices)
    assert torch.equal(sampled(model_of("llama"), prompt, **choices), expected)


CHUNK = 100  # of Llama 4's attention


def chunked_attention(implementation: str) -> Any:
    sizes = {**SIZES, "head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": CHUNK}
    config = transformers.Llama4TextConfig(**sizes, layer_types=["chunked_attention", "full_attention"], attn_implementation=implementation)
    torch.manual_seed(0)
    return transformers.Llama4ForCausalLM(config).eval()


@pytest.mark.parametrize("way", ["dynamic", "static"])
def test_a_chunk_is_a_sequence_of_its_own(way: str, recorder: Recorder) -> None:
    """As in the training forward, where chunks are documents. The control counts positions from the first token."""
    prompt = PROMPT.repeat(1, 2)[:, :190]
    expected = by_eager(chunked_attention("eager"), prompt, **WAYS[way])
    assert torch.equal(expected, sampled(chunked_attention("dash_attn"), prompt, **WAYS[way]))
    q, k, v, out = recorder.joined(0, 0)
    assert same_bits(out, flash_attn_func(q, k, v, mask=Documents((CHUNK, CHUNK, 5))))
    steps = [flash_attn_func(q[:, n : n + 1], k[:, : n + 1], v[:, : n + 1], window_size=(n % CHUNK, 0)) for n in range(190, 205)]
    torch.testing.assert_close(torch.cat(steps, 1), out[:, 190:])
    assert not same_bits(torch.cat(steps, 1), out[:, 190:].contiguous())
    recorder.chains = {key: chunks for key, chunks in recorder.chains.items() if key[0] == 1}
    assert recorder.differing() == [], "the other layer attends to everything"


def test_several_chunks_with_keys_before_them_are_refused() -> None:
    huggingface.enable()
    with pytest.raises(NotImplementedError, match=r"chunks have 100 tokens, and got positions 80 to 119"):
        sampled(chunked_attention("dash_attn"), PROMPT, prefill_chunk_size=80)


def test_the_kernel_for_caches_runs_the_decode_steps(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts do not: the forward is faster for many queries, and has the same bits."""
    calls: list[int] = []
    cached = _caches.flash_attn_with_kvcache

    def counted(q: Tensor, *rest: Any, **options: Any) -> Any:
        calls.append(q.shape[1])
        return cached(q, *rest, **options)

    monkeypatch.setattr(_caches, "flash_attn_with_kvcache", counted)
    for way in ("dynamic", "static"):
        calls.clear()
        sampled(model_of("llama"), **WAYS[way])
        assert calls == [1] * 30, "15 steps of two layers"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONFIGS)
def test_padded_batches(name: str, way: str, recorder: Recorder) -> None:
    """Positions count from the first token that is none of the padding."""
    recorder.padding = {1: 9}
    padding = torch.ones_like(PROMPT)
    padding[1, :9] = 0
    tokens = sampled(model_of(name), attention_mask=padding, **WAYS[way])
    assert {recorder.length(*key) for key in recorder.chains} == {135}
    assert recorder.differing() == []
    assert torch.equal(tokens, sampled(model_of(name, "eager"), attention_mask=padding, **WAYS[way]))


def test_padding_that_counts_as_positions_has_other_bits(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: keys of a padded row counted from the first slot, the padding masked by a window."""
    recorder.padding = {1: 9}
    padding = torch.ones_like(PROMPT)
    padding[1, :9] = 0
    attend = huggingface.attend_to_cache

    def from_the_slot(q: Tensor, k: Tensor, v: Tensor, given: LayerMask, options: Any) -> Tensor:
        given.places = None
        out = attend(q, k, v, given, options)
        given.mask, mask = huggingface.Window(given.keys - 10, 0), given.mask
        out[1:] = attend(q[1:], k[1:], v[1:], given, options)
        given.mask = mask
        return out

    monkeypatch.setattr(huggingface, "attend_to_cache", from_the_slot)
    tokens = sampled(model_of("llama"), attention_mask=padding)
    assert recorder.differing() == ["layer 0, sequence 1", "layer 1, sequence 1"]
    assert torch.equal(tokens, sampled(model_of("llama", "eager"), attention_mask=padding)), "values are right"


@pytest.mark.parametrize("mask", ["10111", "11110", "00000"])
@pytest.mark.parametrize("queries", [1, 2])
def test_places_of_padded_rows(mask: str, queries: int) -> None:
    row = torch.tensor([[int(digit) for digit in mask], [0, 0, 1, 1, 1]])
    slots, positions = (x.tolist() for x in places_in_cache(row, queries, 1, 5).values())
    if mask == "10111":
        assert slots == [-1, -1], "holes"
    elif queries == 1:
        assert (slots, positions) == ([4, 1], [0, 0]), "a query that is padding has no keys"
    else:
        assert slots == [-1, -1], "some of several queries are padding"
    whole = torch.ones(2, 5)
    assert {name: x.tolist() for name, x in places_in_cache(whole, queries, 3, 5).items()} == {
        "cache_leftpad": [0, 0],
        "first_position": [3, 3],
    }


@pytest.mark.parametrize("length", [None, 95], ids=["", "one more token ends a chunk"])
def test_chunks_and_padding_are_as_in_eager(length: int | None) -> None:
    huggingface.enable()
    padding = torch.ones_like(PROMPT)
    padding[1, :9] = 0
    rows = {"attention_mask": padding[:, :length], "return_dict_in_generate": True, "output_logits": True}
    ours, eager = (sampled(chunked_attention(name), PROMPT[:, :length], **rows) for name in ("dash_attn", "eager"))
    assert torch.equal(ours.sequences, eager.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(eager.logits), rtol=1e-5, atol=1e-5)


def test_gradients_through_a_cache_that_dropped_keys_are_refused() -> None:
    huggingface.enable()
    model = model_of("mistral")
    with torch.no_grad():
        cache = model(input_ids=PROMPT, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"no backward for a cache that dropped keys, here those before position 81.*torch.no_grad"):
        model(input_ids=PROMPT[:, :1], past_key_values=cache, use_cache=True)
    with torch.no_grad():
        assert model(input_ids=PROMPT[:, :1], past_key_values=cache, use_cache=True).logits.shape == (2, 1, 64)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_gradients_through_a_static_cache_are_those_of_the_plain_model(name: str) -> None:
    """Slots that are not in use get none."""
    huggingface.enable()
    model = model_of(name, dtype=torch.float64)
    cache = transformers.StaticCache(config=model.config, max_cache_len=200)
    prompt = PROMPT[:, :35]
    plain, cached = (model(input_ids=prompt, **use).logits.square().sum() for use in ({"use_cache": False}, {"past_key_values": cache}))
    expected, found = (torch.autograd.grad(loss, list(model.parameters())) for loss in (plain, cached))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_mask_made_ahead_is_for_its_lengths() -> None:
    made = LayerMask(huggingface.Causal(), (1, 200))
    assert huggingface.mask_for(2, 1, 200, 50, attention_mask=made) is made
    with pytest.raises(NotImplementedError, match=r"a mask of 1 queries and 200 keys .* has 2 queries and 200 keys"):
        huggingface.mask_for(2, 2, 200, 50, attention_mask=made)


def test_a_mask_of_another_kind_covers_a_static_cache() -> None:
    def odd(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (k % 2 == 0)

    rows, columns = torch.arange(50)[:, None], torch.arange(200)
    assert torch.equal(huggingface.mask_for(1, 50, 200, mask_function=odd).mask[0, 0], odd(0, 0, rows, columns))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_compiled_steps_have_the_same_bits(recorder: Recorder) -> None:
    """As `generate` compiles them on a GPU. The length of a static cache is a tensor there, so the programs do not multiply."""
    huggingface.enable()
    plain = sampled(model_of("llama"), return_dict_in_generate=True, output_logits=True)
    config = transformers.CompileConfig(backend="eager")
    config._compile_all_devices = True
    torch._dynamo.reset()
    options = {"return_dict_in_generate": True, "output_logits": True, "cache_implementation": "static", "compile_config": config}
    compiled = sampled(model_of("llama"), **options)
    assert same_bits(torch.stack(compiled.logits), torch.stack(plain.logits))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    sampled(model_of("llama"), max_new_tokens=40, **options)
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs <= graphs, "not more for more tokens"


# Continuous batching. Prompts are so long that lengths tell requests apart, and the third comes in chunks.
PROMPTS = [PROMPT[0, :7].tolist(), PROMPT[1, :30].tolist(), PROMPT[0, :90].tolist()]


def sampled_together(model: Any, prompts: list[list[int]] = PROMPTS, tokens: int = 10) -> list[Any]:
    return batched_together(model, prompts, tokens)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_continuous_batching(name: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIGS, "qwen3", lambda: transformers.Qwen3Config(**SIZES, head_dim=16))
    model = model_of(name)
    found = sampled_together(model)
    assert model.config._attn_implementation == "dash_attn"
    assert {(layer, recorder.length(layer, number)) for layer, number in recorder.chains} == {(i, n) for i in (0, 1) for n in (16, 39, 99)}
    assert recorder.differing() == []
    eager = model_of(name, "eager")
    for prompt, request in zip(PROMPTS, found, strict=True):
        expected = sampled(eager, torch.tensor([prompt]), max_new_tokens=10)
        assert request.generated_tokens == expected[0, len(prompt) :].tolist()


def test_continuous_batching_inside_a_window(recorder: Recorder) -> None:
    sampled_together(model_of("mistral"), [PROMPTS[0], PROMPTS[1][:20]])
    assert {recorder.length(*key) for key in recorder.chains} == {16, 29}
    assert recorder.differing() == []


@pytest.mark.parametrize("name", ["mistral", "gpt-oss"])
def test_continuous_batching_past_a_window(name: str, recorder: Recorder) -> None:
    """From token 128 on a window of 40 keys has two tiles, as in training, though the cache holds no more than 40 keys."""
    prompts = [PROMPTS[0], PROMPT[0, :115].tolist()]
    found = sampled_together(model_of(name), prompts, tokens=30)
    assert {recorder.length(*key) for key in recorder.chains} == {36, 144}
    assert recorder.differing() == []
    for prompt, request in zip(prompts, found, strict=True):
        expected = sampled(model_of(name, "eager"), torch.tensor([prompt]), max_new_tokens=30)
        assert request.generated_tokens == expected[0, len(prompt) :].tolist()


def test_pages_that_do_not_say_what_was_dropped_have_other_bits(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: positions counted from the first key that is left."""
    monkeypatch.setattr(_caches, "_first_positions", lambda offsets, positions, window: [0])
    sampled_together(model_of("mistral"), [PROMPT[0, :115].tolist()], tokens=30)
    assert len(recorder.differing()) == 2, "both layers"


def test_positions_tell_what_was_dropped() -> None:
    ends = torch.tensor([0, 1, 1, 4], dtype=torch.int32), torch.tensor([0, 40, 40, 62], dtype=torch.int32)
    offsets = SequenceOffsets(*ends, 3, 40)
    positions = torch.tensor([[99, 19, 20, 21]])
    assert _caches._first_positions(offsets, positions, 40) == [60, 0, 0]
    with pytest.raises(NotImplementedError, match="needs position_ids to tell which keys a cache with a window of 40 dropped"):
        _caches._first_positions(offsets, None, 40)


def test_continuous_batching_keeps_our_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers replaces implementations that it does not know where flash-attn is installed."""
    from transformers.generation.continuous_batching import continuous_api

    huggingface.enable()
    skip_without_pages()
    monkeypatch.setattr(continuous_api, "is_flash_attn_2_available", lambda **_: True)
    model = model_of("llama")
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "set_attn_implementation", lambda self, name: pytest.fail(f"set to {name}"))
        sampled_together(model, PROMPTS[:1], tokens=2)


def test_the_prefix_of_paged_implementations() -> None:
    """Later versions take it off, earlier ones look for the whole name."""
    huggingface.enable()
    model = model_of("llama")
    expected = sampled_together(model)
    model.set_attn_implementation("paged|dash_attn")
    assert [request.generated_tokens for request in sampled_together(model)] == [request.generated_tokens for request in expected]


class OldPages:
    """The cache of transformers before 5.19: it gives (tokens, heads, dim), and lengths have other names."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, read_index: Any, write_index: Any) -> tuple[Tensor, Tensor]:
        return key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)


@pytest.mark.parametrize("kinds", [1, 2])
def test_lengths_of_earlier_versions(kinds: int) -> None:
    module = torch.nn.Module()
    module.layer_idx = 0
    query, key, value = (torch.randn(1, heads, 9, 16, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    ends = torch.tensor([0, 3, 9], dtype=torch.int32)
    of_layer: dict[str, Any] = {"cu_seq_lens_k": ends, "max_seqlen_k": 6}
    if kinds == 2:
        of_layer = {name: {"full_attention": given, "sliding_attention": None} for name, given in of_layer.items()}
    arguments = {"cache": OldPages(), "read_index": [], "write_index": [], "cu_seq_lens_q": ends, "max_seqlen_q": 6, **of_layer}
    given = huggingface.mask_for(1, 9, 9, mask_function=transformers.masking_utils.causal_mask_function)
    out, _ = huggingface.attention(module, query, key, value, given, **arguments)
    for rows in (slice(0, 3), slice(3, 9)):
        alone = flash_attn_func(*(x[:, :, rows].transpose(1, 2) for x in (query, key, value)), causal=True)
        assert same_bits(out[:, rows], alone)
