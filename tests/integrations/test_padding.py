"""Padded batches of transformers models: the bits of each sequence alone, zeros elsewhere, whole graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from transformers.masking_utils import bidirectional_mask_function  # noqa: E402

from dash_attn import Causal, Full, Mask, Window, flash_attn_func, flash_attn_varlen_func  # noqa: E402
from dash_attn.call.offsets import NO_OFFSETS  # noqa: E402
from dash_attn.integrations import huggingface  # noqa: E402
from dash_attn.integrations._layer_mask import Padding, attends_itself  # noqa: E402
from dense import largest_error  # noqa: E402
from model_sizes import SMALL  # noqa: E402
from padded_rows import AnyAttention, SelfAttention, attend, padding_mask  # noqa: E402

SIZES = {**SMALL, "max_position_embeddings": 512, "use_cache": False}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=40),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=40, attn_logit_softcapping=5.0),
    "gpt_oss": lambda: transformers.GptOssConfig(**SIZES, **EXPERTS, head_dim=8, sliding_window=40),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=12),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=40),
}
FOUR = ("llama", "mistral", "gemma2", "gpt_oss")
LENGTH = 150
LENGTHS = (119, 150, 50)
TOKENS = torch.randint(64, (3, LENGTH), generator=torch.Generator().manual_seed(0))
SIDES = ("left", "right")


@pytest.fixture(autouse=True)
def _registered() -> None:
    huggingface.enable()
    transformers.logging.set_verbosity_error()


def rows_of(side: str) -> Tensor:
    return padding_mask(side, LENGTHS, LENGTH)


def model_of(name: str, implementation: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    chosen = {"attn_implementation": implementation, "experts_implementation": "batched_mm", "dtype": dtype}
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), **chosen)
    for weight_name, weight in model.named_parameters():
        if weight_name.endswith("sinks"):
            weight.data = torch.linspace(-1, 2, 4, dtype=dtype)
    return model


def arguments(kept: Tensor) -> dict[str, Tensor]:
    """Positions count from each sequence's first token. The last padded place of a row on the left would be asked for that token."""
    first = kept.cumsum(1) == 1
    labels = TOKENS.masked_fill((kept == 0) | (first & (kept == 1)), -100)
    return {"attention_mask": kept, "labels": labels, "position_ids": (kept.cumsum(1) - 1).clamp(min=0)}


def step(model: Any, kept: Tensor) -> list[Tensor]:
    """The loss, the logits of what is no padding, and all gradients."""
    result = model(input_ids=TOKENS, **arguments(kept))
    result.loss.backward()
    return [result.loss.detach(), result.logits.detach()[kept.bool()], *(weight.grad for weight in model.parameters())]


def step_of_sequences(model: Any, kept: Tensor) -> list[Tensor]:
    """The same without padding: each sequence alone."""
    logits = []
    losses = []
    for row, keeps in zip(TOKENS, kept.bool(), strict=True):
        found = model(input_ids=row[keeps][None]).logits[0]
        losses.append(nn.functional.cross_entropy(found[:-1], row[keeps][1:], reduction="sum"))
        logits.append(found.detach())
    loss = sum(losses[1:], losses[0]) / (kept.sum() - len(kept))
    loss.backward()
    return [loss.detach(), torch.cat(logits), *(weight.grad for weight in model.parameters())]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", FOUR)
def test_a_training_step_is_within_the_budget_of_eager(name: str, side: str) -> None:
    kept = rows_of(side)
    exact = step_of_sequences(model_of(name, "eager", torch.float64), kept)
    ours, eager = (step(model_of(name, kind), kept) for kind in ("dash_attn", "eager"))
    for mine, theirs, truth in zip(ours, eager, exact, strict=True):
        floor = 16 * torch.finfo(torch.float32).eps * max(1.0, truth.abs().max().item())
        assert largest_error(mine.double(), truth) <= 2 * largest_error(theirs.double(), truth) + floor


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", FOUR)
def test_a_sequence_has_the_bits_it_has_alone(name: str, side: str) -> None:
    """Logits, and the gradients of the tokens' embeddings, which no other row adds to."""
    model, kept = model_of(name, "dash_attn"), rows_of(side)
    positions = (kept.cumsum(1) - 1).clamp(min=0)
    embedded = model.get_input_embeddings()(TOKENS).detach()
    rows = embedded.clone().requires_grad_()
    padded = model(inputs_embeds=rows, attention_mask=kept, position_ids=positions).logits
    (padded.square() * kept[..., None]).sum().backward()
    for row, keeps in enumerate(kept.bool()):
        alone = embedded[row][keeps][None].clone().requires_grad_()
        logits = model(inputs_embeds=alone).logits
        logits.square().sum().backward()
        assert torch.equal(padded[row][keeps], logits[0])
        assert torch.equal(rows.grad[row][keeps], alone.grad[0])
        assert not rows.grad[row][~keeps].any()
    shorter = model(inputs_embeds=embedded, position_ids=positions, attention_mask=torch.ones_like(kept)).logits
    assert not torch.equal(shorter[2][kept[2].bool()], padded[2][kept[2].bool()]) or side == "right"  # the control: the mask matters


def test_which_layers_attend_themselves() -> None:
    bert, bart = transformers.models.bert.modeling_bert, transformers.models.bart.modeling_bart
    assert attends_itself(SelfAttention)
    assert attends_itself(bert.BertSelfAttention)
    assert not any(map(attends_itself, (AnyAttention, bert.BertCrossAttention, bart.BartAttention)))


def inputs(q_len: int, dtype: torch.dtype, dim: int = 16) -> list[Tensor]:
    """q, k, v and the gradient of the output, (3, heads, length, dim)."""
    made = torch.Generator().manual_seed(1)
    shapes = ((3, 4, q_len, dim), (3, 2, LENGTH, dim), (3, 2, LENGTH, dim), (3, q_len, 4, dim))
    return [torch.randn(shape, generator=made).to(dtype) for shape in shapes]


MASKS: list[Mask] = [Causal(), Window(30, 0), Full(), Window(20, 20)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", [*SIDES, "both"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_nothing_reaches_a_sequence_from_beside_it(mask: Mask, side: str, dtype: torch.dtype) -> None:
    """Padded places hold NaN, also in the gradient of the output; they give zeros and get zeros."""
    kept = rows_of(side)
    sinks = torch.linspace(-1, 2, 4, requires_grad=True)
    tensors = inputs(LENGTH, dtype)
    for tensor in tensors[:3]:
        tensor.transpose(1, 2)[kept == 0] = torch.nan
    tensors[3][kept == 0] = torch.nan
    *leaves, dout = [x.requires_grad_() for x in tensors[:3]] + tensors[3:]
    out = attend(SelfAttention(), *leaves, mask, kept, softcap=3.0, s_aux=sinks)
    gradients = torch.autograd.grad(out, (*leaves, sinks), dout)
    of_sinks = []
    for row, keeps in enumerate(kept.bool()):
        alone = [x[row : row + 1].transpose(1, 2)[:, keeps].detach().requires_grad_() for x in leaves]
        own = sinks.detach().clone().requires_grad_()
        expected = flash_attn_func(*alone, mask=mask, softcap=3.0, sinks=own)
        assert torch.equal(out[row][keeps], expected[0])
        assert not out[row][~keeps].any()
        *found, of_sink = torch.autograd.grad(expected, (*alone, own), dout[row : row + 1, keeps])
        of_sinks.append(of_sink)
        for mine, theirs in zip(gradients[:3], found, strict=True):
            assert torch.equal(mine[row].transpose(0, 1)[keeps], theirs[0])
            assert not mine[row].transpose(0, 1)[~keeps].any()
    assert torch.equal(gradients[3], of_sinks[0] + of_sinks[1] + of_sinks[2])


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("mask", MASKS[:2], ids=str)
def test_the_last_queries_of_padded_rows(mask: Mask, side: str) -> None:
    """As with a cache: the queries are the last of the tokens, and some of them, or all, are padding."""
    q_len, kept = 70, rows_of(side)
    q, k, v, _ = inputs(q_len, torch.float32)
    made = huggingface.mask_for(3, q_len, LENGTH, q_offset=LENGTH - q_len, attention_mask=kept)
    made.mask = mask
    out, _ = huggingface.attention(SelfAttention(), q, k, v, made)
    for row, keeps in enumerate(kept.bool()):
        queries = keeps[-q_len:]
        assert not out[row][~queries].any()
        if queries.any():
            alone = (x[row : row + 1].transpose(1, 2) for x in (q[:, :, queries], k[:, :, keeps], v[:, :, keeps]))
            assert torch.equal(out[row][queries], flash_attn_func(*alone, mask=mask)[0])


@pytest.mark.parametrize("q_len", [LENGTH, 40])
def test_queries_that_may_be_others_are_all_attended(q_len: int) -> None:
    """Cross attention: the padded tokens are the encoder's. Lengths may be equal by chance."""
    kept, (q, k, v, _) = rows_of("right"), inputs(q_len, torch.float32)
    out = attend(AnyAttention(), q, k, v, Full(), kept)
    for row, keeps in enumerate(kept.bool()):
        alone = (x[row : row + 1].transpose(1, 2) for x in (q, k[:, :, keeps], v[:, :, keeps]))
        assert torch.equal(out[row], flash_attn_func(*alone)[0])


@pytest.mark.parametrize("side", [*SIDES, "both"])
def test_one_query_attends_what_is_kept_of_others(side: str) -> None:
    """A step of a decoder in cross attention: which end of the source is padded says nothing of the query. A source may be all padding."""
    kept, (q, k, v, _) = rows_of(side), inputs(1, torch.float32)
    kept[1] = 0
    k.transpose(1, 2)[kept == 0] = torch.nan
    made = huggingface.mask_for(3, 1, LENGTH, mask_function=bidirectional_mask_function, attention_mask=kept)
    out, _ = huggingface.attention(AnyAttention(), q, k, v, made)
    for row in (0, 2):
        keeps = kept[row].bool()
        alone = (x[row : row + 1].transpose(1, 2) for x in (q, k[:, :, keeps], v[:, :, keeps]))
        assert torch.equal(out[row], flash_attn_func(*alone)[0])
    assert not out[1].any()


def test_a_window_ahead_in_a_layer_that_may_attend_others_is_refused() -> None:
    padding = Padding(rows_of("left").bool(), LENGTH, Window(20, 20))
    with pytest.raises(NotImplementedError, match="where a layer attends to its own tokens only; AnyAttention may attend to others"):
        padding.offsets(AnyAttention)


@pytest.mark.parametrize("side", SIDES)
def test_an_encoder_and_a_decoder_match_eager(side: str) -> None:
    """Cross attention at equal lengths, where taking the encoder's padding for the decoder's would be a silent error."""
    sizes = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 64, "max_position_embeddings": 256}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}
    kept, found = rows_of(side), []
    for implementation in ("dash_attn", "eager"):
        torch.manual_seed(0)
        config = transformers.BartConfig(**sizes, **heads, attn_implementation=implementation, use_cache=False)
        model = transformers.BartForConditionalGeneration(config).double()
        for weight in model.parameters():
            weight.data *= 4.0 if weight.ndim > 1 else 1.0
        result = model(input_ids=TOKENS, attention_mask=kept, decoder_input_ids=TOKENS.flip(1), labels=TOKENS)
        result.loss.backward()
        found.append([result.logits.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)])
    assert all(largest_error(mine, theirs) < 1e-7 * max(1.0, theirs.abs().max().item()) for mine, theirs in zip(*found, strict=True))


def test_a_row_of_padding_alone() -> None:
    model, kept = model_of("llama", "dash_attn"), rows_of("left")
    kept[1] = 0
    logits = model(input_ids=TOKENS, attention_mask=kept).logits
    assert logits.isfinite().all()
    assert torch.equal(logits[0], model(input_ids=TOKENS[:1], attention_mask=kept[:1]).logits[0])


@pytest.mark.parametrize("name", FOUR)
def test_batched_generation_is_that_of_each_prompt_alone(name: str) -> None:
    """Greedy, with a cache; windows are shorter than the prompts. Tokens are eager's, too."""
    lengths, new = (23, 45, 9), 24
    ours, eager = (model_of(name, kind).eval() for kind in ("dash_attn", "eager"))
    for model in (ours, eager):
        for weight_name, weight in model.named_parameters():
            weight.data *= 4.0 if weight.ndim > 1 and "experts" not in weight_name else 1.0  # scores that differ
    kept, prompts = padding_mask("left", lengths, 45), TOKENS[:, :45]
    choices = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "use_cache": True, "eos_token_id": None}
    together = ours.generate(prompts, attention_mask=kept, **choices)
    assert torch.equal(together, eager.generate(prompts, attention_mask=kept, **choices))
    for row, count in enumerate(lengths):
        prompt = prompts[row : row + 1, 45 - count :]
        alone = ours.generate(prompt, attention_mask=torch.ones_like(prompt), **choices)
        assert torch.equal(alone[0], together[row, 45 - count :])


def test_right_padded_prompts_cannot_be_continued() -> None:
    """New tokens behind the padding of a prompt make a hole. Eager answers, and mixes positions."""
    choices = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    with pytest.raises(
        ValueError, match=r"cannot go on from padding: row \d of .* none up to column 149, and new ones .* Pad prompts on the left"
    ):
        model_of("llama", "dash_attn").eval().generate(TOKENS, attention_mask=rows_of("right"), **choices)


def test_where_only_the_device_knows_holes_are_no_offsets() -> None:
    """On a GPU a kernel finds these and stops; see tests/gpu. On the CPU they raise when the call runs."""
    kept = rows_of("left").bool()
    kept[1, 20] = False
    offsets = Padding(kept, LENGTH, Causal()).offsets(SelfAttention)
    assert offsets.cu_seqlens_q.unique().tolist() == offsets.cu_seqlens_k.unique().tolist() == [NO_OFFSETS]
    q, k, v, _ = inputs(LENGTH, torch.float32)
    rows = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    with pytest.raises(ValueError, match=r"keeps one stretch of each row.*: give holes as a 4-d mask"):
        flash_attn_varlen_func(*rows, offsets.cu_seqlens_q, offsets.cu_seqlens_k, offsets.max_seqlen_q, offsets.max_seqlen_k)


def test_offsets_are_made_without_a_look_at_the_mask() -> None:
    """On the meta device nothing has a value, so reading one raises."""
    kept = rows_of("left").to("meta")
    made = huggingface.mask_for(3, LENGTH, LENGTH, attention_mask=kept)
    offsets = made.padding.offsets(SelfAttention)
    assert offsets.cu_seqlens_q.shape == offsets.cu_seqlens_k.shape == (3 * 3 + 3,)
    places = huggingface.mask_for(3, 1, LENGTH, mask_function=bidirectional_mask_function, attention_mask=kept).places
    assert {name: numbers.shape for name, numbers in places.items()} == {"cache_leftpad": (3,), "cache_seqlens": (3,)}
    with pytest.raises(RuntimeError, match="meta"):
        bool(kept.all())  # the control


def test_layers_on_several_devices_get_the_offsets_where_they_are() -> None:
    made = huggingface.mask_for(3, LENGTH, LENGTH, attention_mask=rows_of("left"))
    q, k, v, _ = (x.to("meta") for x in inputs(LENGTH, torch.float32))
    assert made.padding.offsets(SelfAttention).on(q.device).cu_seqlens_k.device == q.device
    with pytest.raises(ValueError, match="no backend runs on meta"):  # not: cu_seqlens_q must be on the device of q
        huggingface.attention(SelfAttention(), q, k, v, made)


def test_offsets_by_hand() -> None:
    kept = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 0]]).bool()
    offsets = Padding(kept, 5, Causal()).offsets(SelfAttention)
    pairs = list(zip(offsets.cu_seqlens_q.diff().tolist(), offsets.cu_seqlens_k.diff().tolist(), strict=True))
    assert pairs == [(2, 0), (0, 2), (3, 3), (0, 0), (0, 0), (2, 2), (8, 0), (0, 8), (0, 0), (1, 0), (0, 1), (3, 3), (1, 0), (0, 1)]


def test_lengths_beside_padding_are_refused() -> None:
    ends = torch.tensor([0, 150, 300, 450], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 150, "max_length_k": 150}
    model = model_of("llama", "dash_attn")
    with pytest.raises(ValueError, match="beside cu_seq_lens_q, one of ones"):
        model(input_ids=TOKENS, attention_mask=rows_of("left"), **lengths)
    assert torch.equal(model(input_ids=TOKENS, attention_mask=torch.ones_like(TOKENS), **lengths).logits, model(input_ids=TOKENS).logits)


@pytest.mark.parametrize("shape", [(2, 150), (3, 149), (3, 1, 150)], ids=str)
def test_masks_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"a row for each of the 3 sequences and a column for each of the 150 .*; got shape"):
        huggingface.mask_for(3, LENGTH, LENGTH, attention_mask=torch.ones(shape))


def assert_traced_whole(name: str, side: str) -> None:
    kept = rows_of(side)
    expected, model = step(model_of(name, "dash_attn"), kept), model_of(name, "dash_attn")
    model(input_ids=TOKENS)  # watched once
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    result = compiled(input_ids=TOKENS, **arguments(kept))
    result.loss.backward()
    found = [result.loss.detach(), result.logits.detach()[kept.bool()], *(weight.grad for weight in model.parameters())]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    kept[1, 20] = 0
    with pytest.raises(ValueError, match="keeps one stretch of each row"):  # the same program: the values are read when it runs
        compiled(input_ids=TOKENS, **arguments(kept))


@pytest.mark.exhaustive
def test_a_compiled_program_takes_holes_in_a_4d_mask_only() -> None:
    kept = torch.ones(3, LENGTH, dtype=torch.bool)
    kept[1, 20] = False
    model = model_of("llama", "dash_attn").eval()
    expected = model(input_ids=TOKENS, attention_mask=kept).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="give holes as a 4-d mask"):
        compiled(input_ids=TOKENS, attention_mask=kept)
    square = (kept[:, None] & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())[:, None]
    assert torch.equal(compiled(input_ids=TOKENS, attention_mask=square).logits[kept], expected[kept])


@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
@pytest.mark.exhaustive
def test_a_model_traces_whole(name: str) -> None:
    assert_traced_whole(name, "left")


@pytest.mark.exhaustive
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_model_traces_whole(name: str, side: str) -> None:
    assert_traced_whole(name, side)
