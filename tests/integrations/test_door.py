"""What every door has in common: it is opened by enable(), closed by disable(), and open for as long as a block runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from dash_attn.door import Change, Door
from dash_attn.integrations import sdpa

PYTORCH = functional.scaled_dot_product_attention


def library() -> Any:
    return SimpleNamespace(attend="theirs", table={"a": 1})


def opened(door: Door, owner: Any, ours: str = "ours") -> Any:
    return door.open(Change(owner, "attend", ours), Change(owner.table, "b", ours))


def test_blocks_nest_and_put_back_what_was_there() -> None:
    door, owner = Door("test"), library()
    with opened(door, owner):
        with opened(door, owner, "inner"):
            assert (owner.attend, owner.table) == ("inner", {"a": 1, "b": "inner"})
        with pytest.raises(KeyError), opened(door, owner, "inner"):
            raise KeyError
        assert (owner.attend, owner.table) == ("ours", {"a": 1, "b": "ours"})
    assert owner == library()


def test_disable_closes_however_often_it_was_opened() -> None:
    door, owner = Door("test"), library()
    with opened(door, owner):
        opened(door, owner, "again")
        door.close()
        assert owner == library()
    assert owner == library()
    with pytest.raises(RuntimeError, match=r"dash_attn.test is not enabled"):
        door.close()


def test_a_block_also_closes_what_was_opened_in_it() -> None:
    door, owner = Door("test"), library()
    with opened(door, owner):
        opened(door, owner, "inside")
    assert owner == library()


def test_what_another_library_did_since_is_not_undone_in_silence() -> None:
    door, owner = Door("test"), library()
    opened(door, owner)
    owner.attend = "another"
    with pytest.raises(RuntimeError, match=r"attend was changed again after dash_attn.test.enable\(\): .* found 'another'"):
        door.close()
    owner.attend = "ours"  # undone
    door.close()
    assert owner == library()
    with opened(door, owner):  # a block knows what was there before it
        owner.attend = "another"
    assert owner == library()


def test_sdpa_without_a_block() -> None:
    x = torch.randn(1, 2, 300, 8, requires_grad=True)
    with sdpa.enable():
        expected = functional.scaled_dot_product_attention(x, x, x)
    sdpa.enable(schedule="ascending")
    sdpa.enable()
    assert torch.equal(functional.scaled_dot_product_attention(x, x, x), expected)
    sdpa.disable()
    assert functional.scaled_dot_product_attention is PYTORCH
    with pytest.raises(RuntimeError, match="is not enabled"):
        sdpa.disable()


def test_transformers_does_not_know_us_outside() -> None:
    transformers = pytest.importorskip("transformers")
    from dash_attn.integrations import huggingface

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    tokens = torch.zeros(1, 8, dtype=torch.long)
    methods = ("__init__", "post_init", "set_attn_implementation")
    with huggingface.enable():  # other tests may have left it open
        huggingface.disable()
        before = [getattr(transformers.PreTrainedModel, name) for name in methods]
        with huggingface.enable():
            with huggingface.enable():
                model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attn_implementation="dash_attn"))
            expected = model(input_ids=tokens).logits
        assert [getattr(transformers.PreTrainedModel, name) for name in methods] == before
        with pytest.raises((ValueError, KeyError), match="dash_attn"):
            model(input_ids=tokens)
        with pytest.raises(ValueError, match="dash_attn"):
            transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attn_implementation="dash_attn"))
        huggingface.enable()
        assert torch.equal(model(input_ids=tokens).logits, expected)
        huggingface.disable()
