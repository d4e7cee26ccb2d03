"""`generate` of transformers on a GPU: attention has the bits of the training forward, with dynamic and static caches, compiled or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from dash_attn.integrations import huggingface  # noqa: E402
from dense import same_bits  # noqa: E402
from recorded_attention import Recorder  # noqa: E402

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=40),
}
WAYS: dict[str, dict[str, Any]] = {"dynamic": {}, "static": {"cache_implementation": "static", "disable_compile": True}}


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    huggingface.enable()
    made = Recorder()
    transformers.AttentionInterface.register(huggingface.NAME, made.attention)
    yield made
    huggingface.enable()


def sampled(name: str, **choices: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="dash_attn", dtype=torch.bfloat16)
    prompt = torch.randint(1, 64, (2, 120), generator=torch.Generator().manual_seed(0)).cuda()
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "output_logits": True, **choices}
    return model.eval().cuda().generate(prompt, attention_mask=torch.ones_like(prompt), **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONFIGS)
def test_bits_are_those_of_training(name: str, way: str, recorder: Recorder) -> None:
    sampled(name, **WAYS[way])
    assert {recorder.length(*key) for key in recorder.chains} == {139}
    assert recorder.differing() == []


def test_padded_windows_have_the_bits_of_training(recorder: Recorder) -> None:
    """Prompts longer than the window, of which padding leaves more or fewer keys in the cache. A whole model may still differ here:
    PyTorch adds the squares of a norm in another order where there are fewer than 16 rows (docs/log.md)."""
    torch.manual_seed(0)
    wide = {"head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 4}
    config = transformers.MistralConfig(**{**SIZES, **wide}, sliding_window=300)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="dash_attn", dtype=torch.bfloat16)
    kept = torch.ones(5, 333, dtype=torch.int64)
    recorder.padding = dict(enumerate((0, 100, 17, 300, 1)))
    for row, padding in recorder.padding.items():
        kept[row, :padding] = 0
    prompt = torch.randint(1, 64, (5, 333), generator=torch.Generator().manual_seed(0))
    model.eval().cuda().generate(prompt.cuda(), attention_mask=kept.cuda(), max_new_tokens=20, min_new_tokens=20, do_sample=False)
    assert {recorder.length(*key) for key in recorder.chains} == {352}
    assert recorder.differing() == []
    recorder.padding[4] = 0
    assert recorder.differing() == ["layer 0, sequence 4", "layer 1, sequence 4"], "the control: a token more is attended"


def test_compiled_steps_have_the_same_tokens() -> None:
    """transformers compiles steps with a static cache by itself, into CUDA graphs. The rest of the model may round differently there."""
    huggingface.enable()
    plain, compiled = sampled("llama", **WAYS["static"]), sampled("llama", cache_implementation="static")
    assert compiled.sequences.shape == plain.sequences.shape
    assert same_bits(compiled.logits[0], plain.logits[0]), "the prompt is not compiled"
    torch.testing.assert_close(compiled.logits[1], plain.logits[1], atol=0.05, rtol=0.05)
