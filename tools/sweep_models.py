"""Models of a sweep, built tiny with one implementation or another, and what they are given: tokens, rows that are padded, and the
sources of encoder-decoder models.

Every architecture of transformers becomes a model of a few thousand weights by shrinking its default configuration. Sizes are set by the
names that configurations use; lists with an entry per layer are cut to the layers that stay. What needs more is in ODD, with the reason.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dash_attn.integrations import _caches, huggingface

VOCABULARY = 96
TOKENS = range(16, 80)  # ids below and above are for special tokens
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
# The largest value that stays, and what it is for.
SIZES = """
256 max_position_embeddings n_positions max_seq_len max_target_positions n_ctx entity_vocab_size
96  vocab_size decoder_vocab_size vocab_size_per_layer_input pronunciation_vocab_size shape_vocab_size encoder_hash_byte_group_vocab
64  intermediate_size moe_intermediate_size shared_expert_intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim
    expert_ffn_hidden_size ffn_hidden_size dff dim_ff d_inner hidden_dim intermediate_size_mlp feed_forward_size
    dense_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size mlp_dim d_ff
32  hidden_size d_model n_embd dim emb_dim embedding_size embedding_dim attention_hidden_size lru_width word_embed_proj_dim
    input_embedding_size output_embedding_size pronunciation_embed_dim shape_embed_dim pooler_hidden_size entity_emb_size
    true_hidden_size intra_bottleneck_size prediction_head_size router_hidden_size out_hidden_size cross_attention_hidden_size
    hidden_size_global d_latents vision_output_dim projector_input_dim projector_output_dim ple_embed_dim vision_hidden_size
16  sliding_window kv_lora_rank q_lora_rank mamba_d_state state_size ssm_state_size index_head_dim sliding_window_size chunk_size
    mamba_chunk_size attention_window_size window_size local_attention attention_window attention_head_dim attention_chunk_size
    hidden_size_per_layer_input laurel_rank embedding_rank hc_lowrank adapter_rank gated_norm_rank o_lora_rank qk_head_dim
    index_block_size keep_window_size kv_channels mamba_headdim block_size num_latents rel_extent num_landmarks segment_means_seq_len
8   head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim dim_head d_head
    d_kv attention_head_size mamba_d_head mamba_head_dim mamba_n_heads mamba_num_heads n_mamba_heads index_topk swa_head_dim d_rel
    mamba_dt_rank time_step_rank lsh_attn_chunk_length local_attn_chunk_length
4   num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads num_experts
    num_local_experts n_routed_experts moe_num_experts index_n_heads linear_num_heads linear_num_value_heads linear_num_key_heads
    num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads num_self_attention_heads num_cross_attention_heads
    zero_expert_num rotary_dim
2   num_key_value_heads num_experts_per_tok num_experts_per_token moe_topk moe_k topk encoder_layers num_encoder_layers num_kv_heads
    swa_num_key_value_heads num_feedforward_networks index_topk_blocks depth num_self_attends_per_block num_layers_per_stack o_groups
    num_blocks
1   n_group topk_group num_expert_group first_k_dense_replace num_kv_shared_layers n_groups mamba_n_groups
"""
TINY: dict[str, int] = {}
for word in SIZES.split():
    if word.isdigit():
        largest = int(word)
    else:
        TINY[word] = largest
LAYERS = 2
QWEN4_INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16, "indexer_compress_ratio": 4}
# Two layers share their weights.
ZAMBA = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 64}
# What the rules above cannot know. "no default": the default configuration leaves it out, and the model needs it.
ODD: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},  # by default no layer attends
    "cohere_compass_text": {  # no default; the sections are of wider heads
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
    },
    "dbrx": {"attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8.0}},  # no default
    "deepseek_v2": {"num_experts_per_tok": 2},  # no default
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},  # no default
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 2},  # no default
    "gemma3n_text": {"num_kv_shared_layers": 0},  # the last layers take the keys of layers that were cut
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},  # by default no layer attends
    "hunyuan_v1_dense": {"head_dim": 8},  # no default
    "hunyuan_v1_moe": {"head_dim": 8},  # no default
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},  # every eighth layer attends
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},  # no default
    "mamba2": {"num_heads": 8},  # heads x head dim is the expanded hidden size
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},  # by default no layer is sparse
    "ministral": {"head_dim": 8},  # no default
    "nemotron": {"num_key_value_heads": 2},  # no default
    "neomme": {"head_dim": 16},  # rotates a quarter of it, in fours
    "qwen4_exp_text": {"ngram_vocab_size_base": 64, **QWEN4_INDEXER},  # no default
    "recurrent_gemma": {"num_hidden_layers": 3},  # every third layer attends
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 5)},  # must make up the hidden size and the length
    "whisper": {"max_source_positions": 40},
    "xmod": {"default_language": "en_XX"},  # no default
    "zamba": ZAMBA,
    "zamba2": {**ZAMBA, "mamba_headdim": 8},
}
TWO_MODELS = {"bert2bert": ("bert", "bert"), "bert2gpt2": ("bert", "gpt2")}  # an encoder, and a decoder with cross attention

# By kind, the tables of modeling_auto that have its models.
TASKS = {"causal": ("CAUSAL_LM",), "masked": ("MASKED_LM",), "encoder-decoder": ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")}


def _has_an_encoder(name: str) -> bool:
    """The others of these tables are decoders that are given sounds. Two models in one are in TWO_MODELS."""
    config: Any = CONFIG_MAPPING[name]
    return getattr(config, "is_encoder_decoder", False) and not name.endswith("encoder-decoder")


NAMES = {kind: [name for task in of for name in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")] for kind, of in TASKS.items()}
NAMES["encoder-decoder"] = [*sorted({*filter(_has_an_encoder, NAMES["encoder-decoder"])}), *TWO_MODELS]
# Eager takes the softmax in float32 also of float64 scores; gemma4, with the largest scores, is off by 2e-5, by 3e-14 from sdpa.
TOLERANCE = 5e-5
SHARPER = 4.0  # times the initial weights, with which scores are all nearly 0 and any mask is nearly right
NOISE = 0.02  # some start with gates at 0, behind which nothing shows
SINGLE = ("inkling2_text", "mra", "xglm")  # their code has float32 written into it
BATCH, LENGTH = 2, 40
PADDED = {"": slice(0, 0), "left": slice(None, 13), "right": slice(-13, None), "empty": slice(None)}  # what is padded of a row
# Sounds, (frames, features) or samples, of which encoders make fewer; Whisper has features first and reads a fixed length.
SOUNDS: dict[str, Callable[[Any], tuple[int, ...]]] = {
    "speech_to_text": lambda config: (4 * LENGTH, config.input_feat_per_channel),
    "whisper": lambda config: (config.num_mel_bins, 2 * config.max_source_positions),
    "canary": lambda config: (8 * LENGTH, config.encoder_config.num_mel_bins),
    "cohere_asr": lambda config: (8 * LENGTH, config.encoder_config.num_mel_bins),
    "moonshine": lambda config: (400 * LENGTH,),
    "speecht5": lambda config: (400 * LENGTH,),
}
OURS = (ValueError, TypeError, NotImplementedError, RuntimeError, AttributeError)


def tiny_pair(name: str) -> Any:
    """The configuration of two models in one."""
    first, second = (CONFIG_MAPPING[part] for part in TWO_MODELS[name])
    decoder = tiny_config(second, is_decoder=True, add_cross_attention=True)
    together = transformers.EncoderDecoderConfig.from_encoder_decoder_configs
    return together(tiny_config(first), decoder, decoder_start_token_id=1, pad_token_id=0)


def tiny_config(config_class: type, model_type: str = "", **fixed: Any) -> Any:
    """The architecture's default configuration, small enough to run in milliseconds."""
    default = config_class()
    changes = _changes(default)
    for name in config_class.sub_configs:
        part = getattr(default, name, None)
        if part is not None:
            changes[name] = tiny_config(type(part), part.model_type)
    return config_class(**{**changes, **ODD.get(model_type, {}), **fixed})


def _changes(default: Any) -> dict[str, Any]:
    values = {name: value for name, value in vars(default).items() if not name.startswith("_")}
    changes: dict[str, Any] = {}
    layers = _layers_that_stay(default, values)
    depth = next((values[name] for name in LAYER_COUNTS if isinstance(values.get(name), int)), None)
    for name, value in values.items():
        if isinstance(value, (list, tuple)) and depth is not None and len(value) == depth:
            changes[name] = [_small(name, value[layer]) for layer in layers]
        elif name in LAYER_COUNTS and isinstance(value, int):
            changes[name] = len(layers)
        elif isinstance(value, int) and not isinstance(value, bool):
            changes[name] = _small(name, value)
        elif ("dropout" in name or "pdrop" in name) and isinstance(value, float):
            changes[name] = 0.0
    if values.get("num_key_value_heads") == values.get("num_attention_heads") and "num_attention_heads" in changes:
        changes["num_key_value_heads"] = changes["num_attention_heads"]  # some repeat no keys
    return {name: value for name, value in changes.items() if name in values and value != values[name]}


def _small(name: str, value: Any) -> Any:
    if name.endswith(("token_id", "token_index")) and isinstance(value, int) and value >= TOKENS.start:
        return sum(map(ord, name)) % TOKENS.start
    if name == "vocab_size":
        return VOCABULARY
    return min(value, TINY[name]) if name in TINY and isinstance(value, int) else value


def _layers_that_stay(default: Any, values: dict[str, Any]) -> list[int]:
    """The first layer of each kind, at least two layers."""
    kinds = values.get("layer_types") or values.get("layers_block_type") or []
    first = [index for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    return sorted({*first, *range(LAYERS)}) if len(first) < LAYERS else first


# ---- models, and what they are given


@dataclass(frozen=True)
class Outcome:
    """status: "matches", "refused", "no comparison" (eager does not run here either) or "wrong"."""

    status: str
    detail: str = ""


def architectures() -> Iterator[tuple[str, str]]:
    for kind, names in NAMES.items():
        for model_type in names:
            yield kind, model_type


def _classes(kind: str, model_type: str) -> tuple[Any, Any]:
    """The class of the model, and its tiny configuration."""
    if model_type in TWO_MODELS:
        return transformers.EncoderDecoderModel, tiny_pair(model_type)
    config = tiny_config(CONFIG_MAPPING[model_type], model_type)
    mappings = (getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING") for task in TASKS[kind])
    model_class = next(mapping[type(config)] for mapping in mappings if type(config) in mapping)
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    part = config.get_text_config(decoder=True)
    if not isinstance(config, model_class.config_class) and isinstance(part, model_class.config_class):
        config = part
    return model_class, config


def build(kind: str, model_type: str, implementation: str) -> Any:
    model_class, config = _classes(kind, model_type)
    if kind == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    config._attn_implementation = implementation
    config._experts_implementation = "eager"  # in float64
    torch.manual_seed(0)
    model = model_class(config).to(torch.float32 if model_type in SINGLE else torch.float64)
    for weight in model.parameters():
        weight.data *= SHARPER if weight.ndim > 1 else 1.0
        weight.data += NOISE * torch.randn_like(weight)
    return model


def tokens(model: Any, batch: int = BATCH) -> Tensor:
    rows = batch * getattr(model.config, "num_codebooks", 1) if "Musicgen" in type(model).__name__ else batch
    return torch.randint(TOKENS.start, TOKENS.stop, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def padding(sides: tuple[str, ...], length: int = LENGTH) -> Tensor:
    """An attention_mask with a row for each side. The padded part is that of LENGTH columns."""
    kept = torch.ones(len(sides), LENGTH, dtype=torch.long)
    for row, side in zip(kept, sides, strict=True):
        row[PADDED[side]] = 0
    return kept.repeat_interleave(length // LENGTH, 1)


def changed(ids: Tensor, place: int) -> Tensor:
    """Another token at one place of each row."""
    other = ids.clone()
    other[:, place] = TOKENS.start + (other[:, place] - TOKENS.start + 1) % len(TOKENS)
    return other


def source(model: Any, sides: tuple[str, ...], another: bool = False) -> dict[str, Tensor]:
    """What the encoder reads, by the names of the arguments, padded. another: with something else in the middle."""
    name = model.main_input_name
    if name == "input_ids":
        made = torch.randint(TOKENS.start, TOKENS.stop, (len(sides), LENGTH), generator=torch.Generator().manual_seed(3))
        return {name: changed(made, LENGTH // 2) if another else made, "attention_mask": padding(sides)}
    if model.config.model_type not in SOUNDS:
        raise NotImplementedError(f"the sweep makes no {name} for this model")
    shape = SOUNDS[model.config.model_type](model.config)
    sounds = torch.randn(len(sides), *shape, generator=torch.Generator().manual_seed(3), dtype=model.dtype)
    if another:
        sounds[:, shape[0] // 2] += 1
    return {name: sounds, "attention_mask": padding(sides, max(shape))}


def compared(expected: Callable[[], Any], made: Callable[[list[str]], Any], judged: Callable[[Any, Any], Outcome]) -> Outcome:
    """What becomes of `made`, which is given the calls of our attention as they come, beside what eager gives."""
    try:
        with finite_masks():
            theirs = expected()
    except Exception as error:
        return Outcome("no comparison", text_of(error))
    try:
        with counted_calls() as calls:
            ours = made(calls)
    except Exception as error:
        return outcome_of(error)
    return judged(ours, theirs) if calls else Outcome("wrong", "dash_attn was not called")


@contextlib.contextmanager
def counted_calls() -> Iterator[list[str]]:
    """The calls of our attention that models make."""
    calls: list[str] = []

    def counting(name: str, original: Any) -> Any:
        return lambda *args, **kwargs: calls.append(name) or original(*args, **kwargs)  # type: ignore[func-returns-value]

    places = ((huggingface, "flash_attn_func"), (huggingface, "flash_attn_varlen_func"), (_caches, "flash_attn_with_kvcache"))
    with contextlib.ExitStack() as stack:
        for module, name in places:
            stack.enter_context(patch.object(module, name, counting(name, getattr(module, name))))
        yield calls


def finite_masks() -> Any:
    """Eager's masks, with the lowest float32. The lowest float64 is -inf in eager's softmax, which is float32: rows of padding are NaN."""

    def finite_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        mask = eager_mask(*args, **kwargs)
        return mask if mask is None else mask.clamp(min=torch.finfo(torch.float32).min)

    return patch.dict(AttentionMaskInterface._global_mapping, eager=finite_mask)


def outcome_of(error: Exception) -> Outcome:
    """Of ours: an error is right if it is ours and says so."""
    return Outcome("refused" if isinstance(error, OURS) and "dash_attn" in str(error) else "wrong", text_of(error))


def text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def quiet() -> None:
    transformers.logging.set_verbosity_error()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
