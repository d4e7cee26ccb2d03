"""The scripts under benchmarks/ that compile kernels ahead ask for kernels that exist."""

from __future__ import annotations

from benchmarks import decode, devices
from kernel_variants import VARIANTS


def test_kernels_of_decode() -> None:
    needed = decode.needed_kernels()
    assert needed <= set(VARIANTS)
    assert ("forward/attention.cuh", "attention_forward<bf16, 192, 2, false, MaskKind::Band, 128>") in needed


def test_kernels_of_devices() -> None:
    needed = set.union(*map(devices.kernels_of, devices.timed_cases()))
    assert needed
    assert needed <= set(VARIANTS)
