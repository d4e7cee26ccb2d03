"""Kernels compile for sm_90a, without a GPU: all variants but the backward in bfloat16, which test_hopper_compile.py has."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")

from dash_attn.backends.hopper.device.compile import compile_uncached
from kernel_variants import BF16_BACKWARD, OTHERS, VARIANTS, assembler_complaints, is_twin

CASES = [pytest.param(*variant, marks=[pytest.mark.exhaustive] if is_twin(variant[1]) else [], id=variant[1]) for variant in OTHERS]


@pytest.mark.parametrize(("header", "name"), CASES)
def test_variant_compiles_clean(header: str, name: str) -> None:
    kernel = compile_uncached(header, name)
    assert "registers" in kernel.log, "the assembler's report is missing, so spills would go unseen"
    assert assembler_complaints(kernel.log) == []


def test_no_variant_is_left_out() -> None:
    assert sorted([*BF16_BACKWARD, *OTHERS]) == sorted(VARIANTS)
    twins = [name for _, name in VARIANTS if is_twin(name)]
    assert len(twins) == 48
    assert all((header, name.replace("f16", "bf16")) in BF16_BACKWARD for header, name in VARIANTS if name in twins)
