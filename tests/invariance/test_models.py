"""Whole models of transformers: every token that `generate` or `generate_batch` samples has the logits of the training forward of its
sequence, alone, in a batch and packed, bit by bit. Weights are random, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from continuous_batching import batched_together  # noqa: E402
from dash_attn import invariance  # noqa: E402
from dash_attn.integrations import huggingface  # noqa: E402
from dense import same_bits  # noqa: E402
from model_sizes import SMALL  # noqa: E402

SIZES = {**SMALL, "vocab_size": 131, "max_position_embeddings": 512, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
WIDE = {**SIZES, "head_dim": 16}
WINDOW = 20
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**WIDE),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(**WIDE, sliding_window=WINDOW),
    "gemma3": lambda: transformers.Gemma3TextConfig(**WIDE, sliding_window=WINDOW),
    "phi": lambda: transformers.PhiConfig(**SIZES),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=48, n_layer=2, n_head=4, vocab_size=131, n_positions=512, eos_token_id=None, bos_token_id=None, pad_token_id=0
    ),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
    "granite": lambda: transformers.GraniteConfig(**SIZES),
    "stablelm": lambda: transformers.StableLmConfig(**SIZES),
}
NEW = 8
LONGEST = 45
PADDING = {1: [0], 2: [0, 30], 3: [0, 30, 7], 5: [0, 30, 7, 44, 1]}


def model_of(name: str) -> Any:
    huggingface.enable()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="dash_attn").eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)  # no bias is 0, no scale 1
    return model


def prompts(batch: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1, 131, (batch, LONGEST), generator=torch.Generator().manual_seed(batch))
    mask = torch.ones_like(tokens)
    for row, padding in enumerate(PADDING[batch]):
        mask[row, :padding] = 0
    return tokens, mask


def generated(model: Any, batch: int, **choices: Any) -> tuple[list[Tensor], Tensor]:
    """The tokens of each sequence without padding, and the logits with which its new ones were sampled."""
    tokens, mask = prompts(batch)
    choices = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True, **choices}
    out = model.generate(tokens, attention_mask=mask, **choices)
    sequences = [out.sequences[row, padding:] for row, padding in enumerate(PADDING[batch])]
    return sequences, torch.stack(out.logits, 1)


def alone(model: Any, sequence: Tensor, new: int = NEW) -> Tensor:
    """The logits of a training forward, with gradients on, behind which the new tokens are."""
    logits: Tensor = model(input_ids=sequence[None], attention_mask=torch.ones_like(sequence)[None], use_cache=False).logits[0]
    return logits[-new - 1 : -1].detach()


def packed(model: Any, sequences: list[Tensor]) -> list[Tensor]:
    places = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    logits = model(input_ids=torch.cat(sequences)[None], position_ids=places[None], use_cache=False).logits[0].detach()
    return [part[-NEW - 1 : -1] for part in logits.split([len(sequence) for sequence in sequences])]


def padded(model: Any, sequences: list[Tensor]) -> list[Tensor]:
    tokens = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(sequence) for sequence in sequences], batch_first=True)
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits.detach()
    return [row[len(sequence) - NEW - 1 : len(sequence) - 1] for row, sequence in zip(logits, sequences, strict=True)]


def rows_that_differ(some: Tensor, others: Tensor) -> int:
    assert some.shape == others.shape
    return int((some.view(torch.int32) != others.view(torch.int32)).any(-1).sum())


@pytest.mark.parametrize("batch", [1, 3, 5])
@pytest.mark.parametrize("name", CONFIGS)
def test_generate_has_the_logits_of_training(name: str, batch: int) -> None:
    model = model_of(name)
    with invariance.enable():
        sequences, logits = generated(model, batch)
        assert len(logits.flatten(0, 1).unique(dim=0)) == batch * NEW, "rows that differ from each other"
        assert [rows_that_differ(row, alone(model, sequence)) for row, sequence in zip(logits, sequences, strict=True)] == [0] * batch
        assert [rows_that_differ(*pair) for pair in zip(logits, padded(model, sequences), strict=True)] == [0] * batch
        if name != "gpt2":  # its positions are a table, and it has no documents
            assert [rows_that_differ(*pair) for pair in zip(logits, packed(model, sequences), strict=True)] == [0] * batch


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_without_it_logits_differ(name: str) -> None:
    """The control: dash_attn's attention alone is not enough. Which numbers of rows show it depends on the CPU."""
    model = model_of(name)
    results = [generated(model, batch) for batch in PADDING]
    differ = [rows_that_differ(row, alone(model, sequence)) for result in results for sequence, row in zip(*result, strict=True)]
    assert sum(differ) > NEW


def test_with_attention_of_pytorch_logits_differ() -> None:
    """The other control: nor are products and norms alone."""
    model = model_of("llama")
    model.set_attn_implementation("sdpa")
    with invariance.enable():
        sequences, logits = generated(model, 3)
        assert sum(rows_that_differ(row, alone(model, sequence)) for row, sequence in zip(logits, sequences, strict=True))


@pytest.mark.parametrize("choices", [{"cache_implementation": "static"}, {"prefill_chunk_size": 16}], ids=str)
def test_every_cache(choices: dict[str, Any]) -> None:
    model = model_of("mistral")
    with invariance.enable():
        sequences, logits = generated(model, 3, **choices)
        assert [rows_that_differ(row, alone(model, sequence)) for row, sequence in zip(logits, sequences, strict=True)] == [0] * 3


def test_seeds_give_a_sequence_its_tokens_in_any_batch() -> None:
    model, seeds = model_of("qwen3"), torch.arange(5) + 100
    with invariance.enable():
        together, logits = generated(model, 5, logits_processor=[invariance.SeededTokens(seeds)])
        tokens, mask = prompts(5)
        for row in range(5):
            start = PADDING[5][row]
            out = model.generate(
                tokens[row : row + 1, start:],
                attention_mask=mask[row : row + 1, start:],
                max_new_tokens=NEW,
                do_sample=False,
                logits_processor=[invariance.SeededTokens(seeds[row : row + 1])],
            )
            assert torch.equal(out[0], together[row])
            chosen = together[row][-NEW:]
            assert same_bits(invariance.log_probs(logits[row], chosen), invariance.log_probs(alone(model, together[row]), chosen))
        assert len({tuple(sequence[-NEW:].tolist()) for sequence in together}) == 5


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2"])
def test_continuous_batching_has_the_log_probabilities_of_training(name: str) -> None:
    """transformers takes the logarithm of a softmax. Prompts of 1 to 90 tokens; the longest come in chunks."""
    model = model_of(name)
    tokens = torch.randint(1, 131, (5, 90), generator=torch.Generator().manual_seed(9))
    given = [tokens[row, :length].tolist() for row, length in enumerate((1, 7, 30, 64, 90))]
    with invariance.enable():
        for prompt, request in zip(given, batched_together(model, given, NEW, return_logprobs=True), strict=True):
            sequence = torch.tensor(prompt + request.generated_tokens)
            trained = alone(model, sequence).softmax(-1).gather(1, sequence[-NEW:, None])[:, 0].log()
            assert same_bits(torch.tensor(request.logprobs), trained)
