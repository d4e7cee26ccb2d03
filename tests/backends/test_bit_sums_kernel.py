"""The kernel that sums bits, compiled for the host: the sums of PyTorch's operations, which tests/ledgers compares with the definition."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dash_attn
from dash_attn.backends.hopper.driver import bit_sums_header
from dash_attn.backends.hopper.driver.bit_sums_header import CHUNK_BYTES, MOST_TENSORS, BitSumsParams
from dash_attn.ledgers import bit_sums, compare_runs
from dash_attn.ledgers.bit_sums import part_sums
from host_kernels import host_library, write_sources

calls = import_module("dash_attn.backends.hopper.calls.bit_sums")
SOURCES = ("ledger/bit_sums.cuh", bit_sums_header.NAME, "common/types.cuh")
SIZES = (0, 1, 7, 8, 9, 15, 16, 17, 31, 4096, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 4100)  # bytes


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("bit_sums")
    write_sources(folder, SOURCES)
    return host_library(folder, "bit_sums.cpp")


@dataclass
class OnHost:
    """Stands in for the driver, and counts launches."""

    library: ctypes.CDLL
    launches: int = 0

    def load(self, device: int | None) -> OnHost:
        return self

    def prepare(self, grid: int, addresses: Sequence[int]) -> OnHost:
        self.given = BitSumsParams.from_address(addresses[0])
        assert grid == self.given.ctas > 0
        return self

    def on(self, stream: Any) -> None:
        self.launches += 1
        self.library.launch(ctypes.byref(self.given))


@pytest.fixture
def driver(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> OnHost:
    found = OnHost(library)
    for name, value in {"KERNEL": found, "on_device": nullcontext, "current_stream": str, "sm_count": lambda index: 1}.items():
        monkeypatch.setattr(calls, name, value)
    monkeypatch.setattr(bit_sums, "_has_kernel", lambda device: True)
    return found


def by_kernel(tensors: Sequence[Tensor]) -> list[int]:
    (found,) = part_sums(tensors)
    assert found.owners == tuple(range(len(tensors)))
    return [int(one) % 2**64 for one in found.sums]


def by_torch(tensors: Sequence[Tensor]) -> list[int]:
    totals = [0] * len(tensors)
    for group in map(bit_sums._sums_of, bit_sums._groups(enumerate(tensors))):
        for owner, part in zip(group.owners, group.sums.tolist(), strict=True):
            totals[owner] += part
    return [total % 2**64 for total in totals]


def octets(size: int, seed: int = 0) -> Tensor:
    return torch.randint(256, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_sums_of_all_sizes_in_one_launch(driver: OnHost) -> None:
    tensors = [octets(size, seed) for seed, size in enumerate(SIZES)]
    found = by_kernel(tensors)
    assert found == by_torch(tensors)
    assert found[0] == 0
    assert len(set(found)) == len(found)
    assert driver.launches == 1


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 6, 8, 12])
def test_any_address(driver: OnHost, offset: int) -> None:
    tensors = [octets(size + 16)[offset : offset + size] for size in SIZES]
    assert {tensor.data_ptr() % 16 for tensor in tensors} <= {offset, 0}
    assert by_kernel(tensors) == by_torch(tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64], ids=str)
def test_strides_and_dtypes(driver: OnHost, dtype: torch.dtype) -> None:
    tensor = torch.randint(-9, 9, (33, 70), generator=torch.Generator().manual_seed(0)).to(dtype)
    tensors = [tensor, tensor.T, tensor[:, ::3], tensor[5:, 1:], tensor.reshape(-1)[3:], tensor[0, 0], tensor[:0]]
    if dtype.is_complex:
        tensors += [tensor.conj(), tensor.conj().imag]
    assert by_kernel(tensors) == by_torch(tensors)


@pytest.mark.parametrize("ctas", [1, 3, 5, 40])
def test_any_number_of_ctas(driver: OnHost, monkeypatch: pytest.MonkeyPatch, ctas: int) -> None:
    monkeypatch.setattr(calls, "CTAS_PER_SM", ctas)
    tensors = [octets(size, size) for size in (40_000, 10, 0, 0, 200_000, 16_384, 0, 5)]
    assert by_kernel(tensors) == by_torch(tensors)


def test_more_tensors_than_a_launch_has_room_for(driver: OnHost) -> None:
    tensors = [octets(place % 50, place) for place in range(2 * MOST_TENSORS + 3)]
    assert by_kernel(tensors) == by_torch(tensors)
    assert driver.launches == 3
    driver.launches = 0
    assert by_kernel([octets(0)] * 3) == [0] * 3
    assert driver.launches == 0, "there is nothing to read"


def test_a_swap_and_equal_flips_are_seen(driver: OnHost) -> None:
    tensor = octets(20_000)
    swapped, flipped = tensor.clone(), tensor.clone()
    swapped[[3, 17_000]] = tensor[[17_000, 3]]
    flipped[[3, 17_000]] ^= 16
    assert len(set(by_kernel([tensor, swapped, flipped, tensor]))) == 3


def test_a_kernel_that_forgets_the_index_is_caught(driver: OnHost, tmp_path: Path) -> None:
    """The control."""
    write_sources(tmp_path, SOURCES, ("first / 8 * INDEX_FACTOR", "first / 16 * INDEX_FACTOR"))
    driver.library = host_library(tmp_path, "bit_sums.cpp")
    tensors = [octets(CHUNK_BYTES)]
    assert by_kernel(tensors) != by_torch(tensors)


def record(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3).bfloat16().float())
    with dash_attn.ledger(folder, detail=True, keep=2) as ledger:
        ledger.watch(model)
        for _ in range(2):
            batch = torch.randn(5, 8)
            loss = model(batch).square().mean()
            loss.backward()
            ledger.step(model, loss=loss, batch=batch)


def test_a_ledger_is_the_same(driver: OnHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "kernel")
    launches = driver.launches
    assert launches > 20
    monkeypatch.setattr(bit_sums, "_has_kernel", lambda device: False)
    record(tmp_path / "torch")
    assert driver.launches == launches, "the control: without the kernel"
    assert compare_runs(tmp_path / "kernel", tmp_path / "torch").agree


def test_header_has_the_constants_of_the_definition() -> None:
    assert bit_sums_header.INDEX_FACTOR == bit_sums.INDEX
    assert tuple(zip(bit_sums_header.MIX_SHIFTS, (*bit_sums_header.MIX_FACTORS, 1), strict=True)) == bit_sums.ROUNDS
    assert BitSumsParams.bytes() <= 4096, "what every driver takes as parameters"


@pytest.mark.parametrize(("capability", "missing", "expected"), [((8, 0), False, False), ((9, 0), False, True), ((9, 0), True, False)])
def test_which_devices_have_it(monkeypatch: pytest.MonkeyPatch, capability: Any, missing: bool, expected: bool) -> None:
    class Kernel:
        def load(self, index: int) -> None:
            if missing:
                raise ImportError("needs cuda-bindings")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(calls, "KERNEL", Kernel())
    ask = calls.has_kernel.__wrapped__
    if missing:
        with pytest.warns(RuntimeWarning, match="takes longer: needs cuda-bindings"):
            assert not ask(0)
    else:
        assert ask(0) is expected
