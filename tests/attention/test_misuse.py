"""Misuse that test_attention_errors.py and test_varlen.py leave out. Every error says what was asked and what is allowed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dash_attn import (
    Causal,
    Documents,
    Full,
    TileMap,
    explain,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
from devices import dim_features, make_inputs, require
from packed_batches import places

Q, K = torch.zeros(2, 10, 4, 16), torch.zeros(2, 12, 2, 16)
BLOCKS = TileMap([[True, True]], 10, 6)
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int64, torch.float8_e4m3fn], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    q, k = Q.to(dtype), K.to(dtype)
    with pytest.raises(ValueError, match=rf"dtype must be one of torch.float64, .*torch.float16; got {dtype}"):
        flash_attn_func(q, k, k)


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"dropout_p": NAN}, r"dropout_p must be 0, or from 1/65536 to 1 - 1/65536; got nan"),
    ({"dropout_p": None}, r"dropout_p must be 0, .*got None"),
    ({"softmax_scale": -INF}, r"softmax_scale must be a finite number other than 0; got -inf"),
    ({"softmax_scale": 10**400}, r"softmax_scale must be a finite number other than 0; got 1(0){56}\.\.\.$"),
    ({"softcap": 10**400}, r"softcap must be .*got 1(0){56}\.\.\.$"),
    ({"dropout_p": 10**400}, r"dropout_p must be .*got 1(0){56}\.\.\.$"),
    ({"head_offset": 10**400}, r"head_offset must be .*got 1(0){56}\.\.\.$"),
    ({"softmax_scale": True}, r"softmax_scale .*got True"),
    ({"softmax_scale": torch.tensor(0.5)}, r"softmax_scale .*got tensor"),
    ({"softcap": INF}, r"softcap must be a finite number > 0, or 0 for none; got inf"),
    ({"softcap": None}, r"softcap must be .*got None"),
    ({"softcap": True}, r"softcap must be .*got True"),
    ({"window_size": None}, r"window_size must be \(left, right\).*got None"),
    ({"window_size": (None, 0)}, r"window_size must be .*got \(None, 0\)"),
    ({"window_size": (True, 0)}, r"window_size must be .*got \(True, 0\)"),
    ({"window_size": (2**31, 0)}, r"below 2\^31.*got 2147483648"),
    ({"mask": BLOCKS, "window_size": (3, 3)}, r"either mask or causal/window_size; got mask=TileMap.*window_size=\(3, 3\)"),
    ({"mask": BLOCKS, "causal": True}, r"either mask or causal/window_size; got mask=TileMap.*causal=True"),
    ({"mask": Documents((5, 5)), "causal": True}, r"either mask or causal/window_size"),
    ({"schedule": None}, r"unknown schedule None; choose from auto"),
    ({"schedule": ["auto"]}, r"unknown schedule \['auto'\]"),
    ({"accumulation": None}, r"unknown accumulation None; choose from ordered, unordered"),
    ({"backend": None}, r"unknown backend None; choose from auto"),
    ({"backend": "Hopper"}, r"unknown backend 'Hopper'"),
    ({"head_offset": 1.0}, r"head_offset must be a whole number >= 0 and below 2\^31; got 1.0"),
    ({"head_offset": True}, r"head_offset must be .*got True"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=[str(options) for options, _ in OPTIONS])
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flash_attn_func(Q, K, K, **options)


@pytest.mark.parametrize("mask", [Causal, True, [[True]], {"causal": True}], ids=str)
def test_masks_that_are_none(mask: Any) -> None:
    with pytest.raises(TypeError, match=r"mask must be a dash_attn mask \(Full, Causal, Window, Documents, Prefix, TileMap\); got"):
        flash_attn_func(Q, K, K, mask=mask)


ARRAYS: list[tuple[dict[str, Any], str]] = [
    ({"dropout_p": np.zeros(2)}, r"dropout_p must be 0, .*got array"),
    ({"dropout_p": torch.zeros(2)}, r"dropout_p must be 0, .*got tensor"),
    ({"deterministic": np.ones(2)}, r"deterministic must be True or False; got array"),
    ({"deterministic": torch.ones(2), "accumulation": "unordered"}, r"deterministic must be True or False; got tensor"),
    ({"schedule": np.array(["auto", "weave"])}, r"unknown schedule array"),
    ({"accumulation": np.array(["ordered", "unordered"])}, r"unknown accumulation array"),
]


@pytest.mark.parametrize(("options", "message"), ARRAYS, ids=[message for _, message in ARRAYS])
def test_arrays_where_one_value_is_meant(options: dict[str, Any], message: str) -> None:
    """An array has no truth of its own; NumPy's and PyTorch's errors about that name no argument."""
    with pytest.raises((ValueError, TypeError), match=message):
        flash_attn_func(Q, K, K, **options)


@pytest.mark.parametrize("causal", ["False", None, 1], ids=repr)
def test_explain_takes_the_same_flags(causal: Any) -> None:
    with pytest.raises(TypeError, match="causal must be True or False"):
        explain(flash_attn_func, Q, K, K, causal=causal)


@pytest.mark.parametrize("flag", ["causal", "deterministic"])
def test_flags_that_are_words_in_a_compiled_program(flag: str) -> None:
    compiled = torch.compile(lambda q, k: flash_attn_func(q, k, k, **{flag: "False"}), backend="eager")
    with pytest.raises(TypeError, match=f"{flag} must be True or False; got 'False'"):
        compiled(Q, K)


def test_nested_and_sparse_tensors_of_the_packed_functions() -> None:
    nested = torch.nested.nested_tensor([torch.ones(3, 3, 2, 8)], layout=torch.jagged)
    with pytest.raises(ValueError, match="qkv must be dense; got a nested tensor"):
        flash_attn_qkvpacked_func(nested)
    ends = places([10], "cpu")
    with pytest.raises(ValueError, match=r"cu_seqlens_k must be dense .*got a sparse_coo tensor"):
        flash_attn_varlen_func(Q[0], Q[0], Q[0], ends, ends.to_sparse(), 10, 10)


FLAGS = ["causal", "deterministic", "return_lse", "return_attn_probs"]


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_that_are_words(flag: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"{flag} must be"):
        flash_attn_func(Q, K, K, **{flag: "False"})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_sparse_tensors() -> None:
    with pytest.raises((ValueError, TypeError), match="q must be"):
        flash_attn_func(Q.to_sparse(), K, K)
    with pytest.raises((ValueError, TypeError), match="k must be"):
        flash_attn_func(Q, torch.nested.as_nested_tensor(list(K)), K)


def test_a_scale_that_no_float_holds() -> None:
    with pytest.raises(ValueError, match="softmax_scale must be a finite number"):
        flash_attn_func(Q, K, K, softmax_scale=10**400)


PACKED: dict[str, Any] = {
    "q": torch.zeros(10, 4, 16),
    "k": torch.zeros(12, 2, 16),
    "v": torch.zeros(12, 2, 16),
    "cu_seqlens_q": places([4, 6], "cpu"),
    "cu_seqlens_k": places([7, 5], "cpu"),
    "max_seqlen_q": 6,
    "max_seqlen_k": 7,
}
BAD_PACKED: list[tuple[dict[str, Any], str]] = [
    ({"cu_seqlens_q": places([4, 6], "cpu").float()}, r"cu_seqlens_q must be a 1-d int32 tensor .*got torch.float32"),
    ({"cu_seqlens_q": places([4, 6], "cpu").short()}, r"cu_seqlens_q must be a 1-d int32 tensor .*got torch.int16"),
    ({"cu_seqlens_k": torch.tensor(0, dtype=torch.int32)}, r"cu_seqlens_k must be a 1-d int32 .*of shape \(\)"),
    ({"cu_seqlens_q": torch.tensor([-1, 4, 10], dtype=torch.int32)}, r"cu_seqlens_q must start at 0"),
    ({"cu_seqlens_q": torch.tensor([0, 12, 10], dtype=torch.int32)}, r"cu_seqlens_q must not decrease; got 12 followed by 10"),
    ({"cu_seqlens_k": places([7, 6], "cpu")}, r"cu_seqlens_k must start at 0 and end at .*\(12\); got 0 and 13"),
    ({"max_seqlen_q": None}, r"max_seqlen_q must be a whole number"),
    ({"max_seqlen_q": True}, r"max_seqlen_q must be a whole number"),
    ({"max_seqlen_k": -1}, r"max_seqlen_k must be a whole number"),
    ({"k": torch.zeros(12, 2, 16, device="meta")}, r"one device; got cpu, meta, cpu"),
    ({"k": torch.zeros(12, 3, 16), "v": torch.zeros(12, 3, 16)}, r"query heads must be a multiple of KV heads"),
    ({"v": torch.zeros(12, 1, 16)}, r"k and v must have the same"),
    ({"k": torch.zeros(12, 2, 8)}, r"q and k must have the same head dim"),
    ({"mask": Causal(), "causal": True}, r"either mask or causal/window_size"),
    ({"accumulation": "unordered", "deterministic": True}, r"contradicts"),
    ({"schedule": "fastest"}, r"unknown schedule 'fastest'; choose from auto"),
    ({"softcap": NAN}, r"softcap must be .*got nan"),
    ({"softmax_scale": 0}, r"softmax_scale must be a finite number other than 0; got 0"),
]


def test_the_arguments_that_the_errors_start_from_are_good() -> None:
    assert flash_attn_varlen_func(**PACKED).shape == (10, 4, 16)
    assert flash_attn_func(Q, K, K, mask=BLOCKS).shape == Q.shape


@pytest.mark.parametrize(("changes", "message"), BAD_PACKED, ids=[message for _, message in BAD_PACKED])
def test_packed_batches(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(**{**PACKED, **changes})


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_lengths_on_another_device(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be on the device of q, k and v \(cpu\); got meta"):
        flash_attn_varlen_func(**{**PACKED, name: PACKED[name].to("meta")})


def test_the_other_functions_refuse_what_flash_attn_func_refuses() -> None:
    wrong = {"mask": Full(), "causal": True}
    for call in (
        lambda: flash_attn_qkvpacked_func(torch.zeros(1, 4, 3, 1, 8), **wrong),
        lambda: flash_attn_kvpacked_func(Q, torch.stack([K, K], 2), **wrong),
        lambda: explain(flash_attn_func, Q, K, K, **wrong),
    ):
        with pytest.raises(ValueError, match="either mask or causal/window_size"):
            call()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_hopper_takes_16_bits(dtype: torch.dtype) -> None:
    q, k, v, _ = make_inputs("cuda", (64, 64), dtype=dtype)
    with pytest.raises(ValueError, match=rf"backend 'hopper' takes bfloat16 and float16; got {dtype}"):
        flash_attn_func(q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [257, 320, 512])
def test_hopper_takes_head_dims_up_to_256(dim: int) -> None:
    q, k, v, _ = make_inputs("cuda", (64, 64), dims=(dim, 0))
    with pytest.raises(ValueError, match=rf"head dim.*{dim}"):
        flash_attn_func(q, k, v)


@pytest.mark.gpu
def test_hopper_takes_head_dims_up_to_256_of_v_alone() -> None:
    require("cuda", *dim_features(128, 320))
    q, k, v, _ = make_inputs("cuda", (64, 64), dims=(128, 320))
    with pytest.raises(ValueError, match=r"head dim.*320"):
        flash_attn_func(q, k, v)


@pytest.mark.gpu
def test_tensors_of_two_devices_on_the_gpu() -> None:
    require("cuda", "varlen")
    q, k, v, _ = (x[0] for x in make_inputs("cuda", (64, 64)))
    ends = places([64], "cuda")
    with pytest.raises(ValueError, match=r"cu_seqlens_k must be on the device of q, k and v"):
        flash_attn_varlen_func(q, k, v, ends, ends.cpu(), 64, 64)
    with pytest.raises(ValueError, match=r"one device; got cuda:0, cpu, cuda:0"):
        flash_attn_varlen_func(q, k.cpu(), v, ends, ends, 64, 64)
