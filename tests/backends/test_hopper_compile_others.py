"""Kernels compile for sm_90a, without a GPU: all variants but the backward in bfloat16, which test_hopper_compile.py has."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")

from dash_attn.backends.hopper.driver.compile import compile_uncached
from kernel_cases import cases
from kernel_variants import ALWAYS, BF16_BACKWARD, OTHERS, VARIANTS, allowed_bytes, assembler_complaints, choices, is_one_of_few, multiplies


@pytest.mark.parametrize(("header", "name"), cases(OTHERS))
def test_variant_compiles_clean(header: str, name: str) -> None:
    kernel = compile_uncached(header, name)
    assert "registers" in kernel.log, "the assembler's report is missing, so spills would go unseen"
    assert assembler_complaints(kernel.log, allowed_bytes(name)) == []


def test_no_variant_is_left_out() -> None:
    assert sorted([*BF16_BACKWARD, *OTHERS]) == sorted(VARIANTS)


def test_every_choice_of_every_kernel_that_multiplies_is_always_compiled() -> None:
    """But for dropout and ALiBi, and for legs, of which few stand for all."""
    plain = [name for _, name in VARIANTS if multiplies(name) and not is_one_of_few(name)]
    assert set().union(*map(choices, ALWAYS)) >= set().union(*map(choices, plain))
    assert {name.split("<")[0] for name in ALWAYS} == {name.split("<")[0] for _, name in VARIANTS}
    assert {name for _, name in VARIANTS} >= ALWAYS
    assert len(ALWAYS) < len(VARIANTS) / 8, "the control: they are few"
