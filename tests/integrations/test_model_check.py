"""A model of transformers whose attention does not go through dash_attn raises; one whose attention does keeps nothing of the check."""

from __future__ import annotations

import ast
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

transformers = pytest.importorskip("transformers")

from dash_attn import Causal  # noqa: E402
from dash_attn.integrations import _model_check, huggingface  # noqa: E402
from dash_attn.integrations._layer_mask import ForeignUse, LayerMask  # noqa: E402
from sweep_models import tiny_config  # noqa: E402

SIZES = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 512},
}
TOKENS = torch.randint(64, (2, 30), generator=torch.Generator().manual_seed(0))
BLOOM = {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}


@pytest.fixture(autouse=True)
def _registered() -> None:
    transformers.logging.set_verbosity_error()
    huggingface.enable()


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "attn_implementation": "dash_attn", **changes}))


def watched(model: nn.Module) -> int:
    """How many models in this one are to be watched."""
    return sum("dash_attn_watches" in vars(part) for part in model.modules())


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "own code": (lambda: transformers.BloomForCausalLM(transformers.BloomConfig(**BLOOM, attn_implementation="dash_attn")), "BloomModel"),
    "a table of classes": (
        lambda: transformers.GPTJForCausalLM(transformers.GPTJConfig(n_layer=1, n_embd=32, n_head=4, attn_implementation="dash_attn")),
        "GPTJForCausalLM",
    ),
    "set later": (
        lambda: transformers.BloomForCausalLM(transformers.BloomConfig(**BLOOM)).set_attn_implementation("dash_attn"),
        "BloomForCausalLM",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_with_attention_of_its_own_is_not_built(case: str) -> None:
    build, name = REFUSED[case]
    with pytest.raises(ValueError, match=rf'{name} does not work with attn_implementation="dash_attn"'):
        build()


class OwnSoftmax(nn.Module):
    """A layer whose code does not show what it does: nothing in its name or in the names it uses."""

    def forward(self, hidden_states: Any, **kwargs: Any) -> tuple[Any, None]:
        scores = hidden_states[:, None] @ hidden_states[:, None].mT
        return (getattr(functional, "soft" + "max")(scores, -1) @ hidden_states[:, None])[:, 0], None


class PlainSum(nn.Module):
    def forward(self, hidden_states: Any, **kwargs: Any) -> tuple[Any, None]:
        return hidden_states.cumsum(1), None


def test_the_first_forward_finds_attention_of_its_own_in_one_layer() -> None:
    model = llama()
    model.model.layers[1].self_attn = OwnSoftmax()
    for _ in range(2):  # and it stays wrong
        with pytest.raises(RuntimeError, match=r"LlamaModel does not work .*: OwnSoftmax computes attention of its own"):
            model(input_ids=TOKENS)
    assert not _model_check._watches.open


def test_the_first_forward_finds_that_nothing_went_through() -> None:
    model = llama()
    for layer in model.model.layers:
        layer.self_attn = PlainSum()
    with pytest.raises(RuntimeError, match=r"LlamaForCausalLM does not work .*: its forward did not call dash_attn once"):
        model(input_ids=TOKENS)
    mixed = llama()  # a hybrid model: layers without attention are fine
    mixed.model.layers[0].self_attn = PlainSum()
    mixed(input_ids=TOKENS)


def test_a_part_with_another_implementation_may_have_its_own() -> None:
    model = llama()
    model.model.config = copy.deepcopy(model.config)
    model.model.layers[1].self_attn = OwnSoftmax()
    model.model.layers[1].self_attn.config = copy.deepcopy(model.config)
    model.model.layers[1].self_attn.config._attn_implementation = "eager"
    model(input_ids=TOKENS)


def test_parts_of_a_model_can_have_their_own_implementation() -> None:
    """The vision tower of GotOcr2 has attention code of its own; the text model has not."""
    config = tiny_config(transformers.GotOcr2Config, "got_ocr2")
    config._attn_implementation = "dash_attn"
    with pytest.raises(ValueError, match="GotOcr2VisionAttention computes attention of its own"):
        transformers.GotOcr2ForConditionalGeneration(config)
    config._attn_implementation = {"": "dash_attn", "text_config": "dash_attn", "vision_config": "eager"}
    model = transformers.GotOcr2ForConditionalGeneration(config)
    model(input_ids=TOKENS % 32 + 16)
    model.set_attn_implementation({"vision_config": "eager", "text_config": "eager"})
    with pytest.raises(ValueError, match=r"GotOcr2VisionEncoder does not work .*cannot set its"):
        model.set_attn_implementation({"vision_config": "dash_attn"})


def test_the_first_forward_says_how_to_leave_out_a_part() -> None:
    """A vision tower whose last layer is attention of PyTorch. What the message says works."""
    config = tiny_config(transformers.Gemma3Config, "gemma3", image_token_id=61, mm_tokens_per_image=4)
    config.vision_config.image_size, config.vision_config.patch_size = 16, 4
    tokens = TOKENS[:1] % 32 + 16
    tokens[0, 3:7] = 61
    given = {"input_ids": tokens, "token_type_ids": (tokens == 61).long(), "pixel_values": torch.randn(1, 3, 16, 16)}
    config._attn_implementation = "dash_attn"
    with pytest.raises(RuntimeError, match=r"SiglipVisionModel .* of its own.* for this part alone: attn_implementation=") as raised:
        transformers.Gemma3ForConditionalGeneration(config)(**given)
    config._attn_implementation = ast.literal_eval(str(raised.value).partition("alone: attn_implementation=")[2])
    model = transformers.Gemma3ForConditionalGeneration(config)
    model(**given)
    assert model.model.language_model.config._attn_implementation == "dash_attn"


def test_nothing_is_left_after_the_first_forward() -> None:
    model, plain = llama(), llama(attn_implementation="eager")
    assert watched(plain) == 0 < watched(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    model(input_ids=TOKENS)
    assert watched(model) == 0
    assert not _model_check._watches.open


def test_the_watch_goes_on_after_a_forward_that_failed() -> None:
    model = llama()
    with pytest.raises(ValueError, match="a column for each of the 30 tokens"):
        model(input_ids=TOKENS, attention_mask=torch.ones_like(TOKENS)[:1])
    assert watched(model) > 0
    assert not _model_check._watches.open
    model(input_ids=TOKENS)
    assert watched(model) == 0


def test_the_watch_survives_an_interrupt() -> None:
    model = llama()
    model.model.layers[0].mlp.forward = lambda *given: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        model(input_ids=TOKENS)
    other = llama()
    for layer in other.model.layers:
        layer.self_attn = PlainSum()
    with pytest.raises(RuntimeError, match="did not call dash_attn once"):
        other(input_ids=TOKENS)
    assert not _model_check._watches.open


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"])
def test_a_watched_model_can_be_copied(copied: Callable[[Any], Any]) -> None:
    model = llama()
    other = copied(model)
    assert watched(other) == watched(model) > 0
    assert torch.equal(other(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)
    assert watched(other) == watched(model) == 0


def test_gradient_checkpointing_in_the_first_forward() -> None:
    model, other = llama().train(), llama().train()
    other.gradient_checkpointing_enable()
    for each in (model, other):
        each(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert watched(other) == 0
    assert all(torch.equal(one.grad, two.grad) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_set_later_is_checked_too() -> None:
    model = llama(attn_implementation="eager")
    model.set_attn_implementation("dash_attn")
    assert watched(model) > 0
    model(input_ids=TOKENS)
    assert watched(model) == 0
    model.set_attn_implementation("eager")
    assert watched(model) == 0


def test_check_is_for_models_changed_by_hand() -> None:
    model = transformers.BloomForCausalLM(transformers.BloomConfig(**BLOOM))
    huggingface.check(model)  # eager: nothing to say
    model.config._attn_implementation = "dash_attn"
    with pytest.raises(ValueError, match="BloomAttention computes attention of its own"):
        huggingface.check(model)


def test_registering_twice_wraps_once() -> None:
    before = transformers.PreTrainedModel.post_init, transformers.PreTrainedModel.__init__
    huggingface.enable()
    assert (transformers.PreTrainedModel.post_init, transformers.PreTrainedModel.__init__) == before


FOREIGN: dict[str, Callable[[Any], Any]] = {
    "add": lambda mask: torch.zeros(2, 1, 30, 30) + mask,
    "add in place": lambda mask: torch.zeros(2, 1, 30, 30).add_(mask),
    "one minus": lambda mask: (1.0 - mask) * -1e4,
    "invert": lambda mask: ~mask,
    "where": lambda mask: torch.where(mask, torch.zeros(1), torch.ones(1)),
    "masked_fill": lambda mask: torch.zeros(30, 30).masked_fill(mask, 0.0),
    "new axis": lambda mask: mask[:, None],
    "cut": lambda mask: mask[:, :, :, :29],
    "dtype": lambda mask: mask.dtype,
    "to": lambda mask: mask.to(torch.float32),
    "size": lambda mask: mask.size(-1),
    "equal": lambda mask: mask == 0,
    "truth": lambda mask: bool(mask),
    "length": lambda mask: len(mask),
    "sdpa": lambda mask: functional.scaled_dot_product_attention(*torch.zeros(3, 2, 4, 30, 8), attn_mask=mask),
}


@pytest.mark.parametrize("use", FOREIGN)
def test_other_code_cannot_use_our_mask(use: str) -> None:
    with pytest.raises((ForeignUse, TypeError), match=r"dash_attn's mask is not a tensor, and .* attention code is its own"):
        FOREIGN[use](LayerMask(Causal(), (30, 30)))


def test_our_mask_can_be_cut_to_itself_and_copied() -> None:
    mask = LayerMask(Causal(), (30, 40))
    assert mask[:, :, :, :40] is mask
    assert mask[:, :, :30, :64] is mask
    assert mask.contiguous() is mask
    assert copy.deepcopy(mask).lengths == pickle.loads(pickle.dumps(mask)).lengths == (30, 40)
    assert not hasattr(mask, "to")
    assert "causal, 30 queries, 40 keys" in repr(mask)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_model_compiles_in_parts_and_says_so() -> None:
    model = llama().eval()
    expected = llama(attn_implementation="eager").eval()(input_ids=TOKENS, use_cache=False).logits
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile it without fullgraph=True"):
        torch.compile(model, fullgraph=True, backend="eager")(input_ids=TOKENS, use_cache=False)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(input_ids=TOKENS, use_cache=False).logits, expected)
    torch._dynamo.reset()
    explained = torch._dynamo.explain(model)(input_ids=TOKENS, use_cache=False)
    assert explained.graph_break_count <= 4  # whatever the number of layers
    model(input_ids=TOKENS)
    assert watched(model) == 0


def test_inference_mode() -> None:
    model = llama().eval()
    with torch.inference_mode():
        found = model(input_ids=TOKENS).logits
    torch.testing.assert_close(found, model(input_ids=TOKENS).logits)


def test_a_causal_model_does_not_look_ahead() -> None:
    """The reproduction of what went wrong: bloom and others read None as no mask, and attended the future."""
    made = huggingface.mask_for(batch_size=1, q_length=4, kv_length=4)
    assert made is not None
    assert made.mask == Causal()
    model, changed = llama().eval(), TOKENS.clone()
    changed[:, -1] += 1
    first, second = (model(input_ids=ids % 64).logits for ids in (TOKENS, changed))
    assert torch.equal(first[:, :-1], second[:, :-1])
