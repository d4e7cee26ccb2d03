"""`generate_batch` of transformers, from version 5.17 on."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from dash_attn.libraries import LEAST_WITH_PAGES, installed, numbers


def skip_without_pages() -> None:
    if numbers(installed("transformers") or "") < numbers(LEAST_WITH_PAGES):
        pytest.skip(f"generate_batch with dash_attn needs transformers {LEAST_WITH_PAGES}")


def batched_together(model: Any, prompts: list[list[int]], tokens: int, **choices: Any) -> list[Any]:
    """The requests in the order of the prompts. Long prompts come in chunks."""
    import transformers

    skip_without_pages()
    known = {field.name for field in fields(transformers.ContinuousBatchingConfig)}
    size = "page_size" if "page_size" in known else "block_size"  # before 5.19
    options = {name: choices.pop(name) for name in list(choices) if name in known}
    pages = transformers.ContinuousBatchingConfig(**{size: 16}, num_blocks=60, max_batch_tokens=64, **options)
    choices = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0, **choices}
    config = transformers.GenerationConfig(max_new_tokens=tokens, **choices)
    found = model.generate_batch(inputs=prompts, generation_config=config, continuous_batching_config=pages)
    return [found[name] for name in sorted(found, key=lambda name: int(name.split("_")[-1]))]
