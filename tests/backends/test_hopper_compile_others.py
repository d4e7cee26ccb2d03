"""Kernels compile for sm_90a, without a GPU: all variants but the backward in bfloat16, which test_hopper_compile.py has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")

from dash_attn.backends.hopper.device.compile import compile_uncached
from kernel_cases import cases
from kernel_variants import (
    ALWAYS,
    ATTENTION,
    BF16_BACKWARD,
    FEW_MODIFIED,
    MODIFIED,
    MORE_BITS,
    OTHERS,
    VARIANTS,
    allowed_bytes,
    assembler_complaints,
    is_like_another,
    is_twin,
    is_usual,
    pairs,
)


@pytest.mark.parametrize(("header", "name"), cases(OTHERS))
def test_variant_compiles_clean(header: str, name: str) -> None:
    kernel = compile_uncached(header, name)
    assert "registers" in kernel.log, "the assembler's report is missing, so spills would go unseen"
    assert assembler_complaints(kernel.log, allowed_bytes(name)) == []


def together(names: Iterable[str]) -> set[Any]:
    return set().union(*map(pairs, names))


def test_no_variant_is_left_out() -> None:
    assert sorted([*BF16_BACKWARD, *OTHERS]) == sorted(VARIANTS)
    names = {name for _, name in VARIANTS}
    twins, modified = set(filter(is_twin, names)), {name for _, name in MODIFIED}
    assert names >= ALWAYS >= names - set(ATTENTION) - twins - modified
    assert modified & ALWAYS == FEW_MODIFIED
    assert {name.replace("<f16", "<bf16") for name in twins} <= ALWAYS
    assert not twins & ALWAYS


def test_every_two_choices_meet_in_a_variant_that_is_always_compiled() -> None:
    """But for boolean masks and what is like another, of which few stand for all."""
    compiled = [name for name in ATTENTION if name in ALWAYS]
    assert together(name for name in compiled if "<bf16" in name) >= together(
        name for name in ATTENTION if "<bf16" in name and "Bits" not in name and not is_like_another(name)
    )
    assert {name.split("<")[0] for name in compiled if "<f16" in name} == {name.split("<")[0] for name in ATTENTION}
    usual = {name for name in ATTENTION if is_usual(name)} - MORE_BITS
    assert {name.split("<")[0] for name in compiled if "Bits" in name} == {"attention_forward", "attention_backward"}
    assert all(name in ALWAYS for name in usual if "<bf16" in name)
    assert {name.split("<")[0] for name in compiled} == {"attention_forward", "attention_backward", "attention_backward_of_legs"}
    assert len(compiled) < len(ATTENTION) / 2, "the control: they are few"
