"""Kernels that came with the package are found by source, options and name, and run if the driver loads them. No GPU, nothing compiled."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from dash_attn import explain, flash_attn_func
from dash_attn.backends.hopper.driver.compile import Kernel, read_kernel, write_kernel
from dash_attn.tools.machine import Snapshot, version_facts
from loading_driver import LoadingDriver, Status

compiling, driver = (import_module(f"dash_attn.backends.hopper.driver.{name}") for name in ("compile", "launch"))
devices = import_module("dash_attn.backends.hopper.ranks")

OTHER = ("forward/attention.cuh", "other")
UNPACKED = ("forward/attention.cuh", "unpacked")
NEW, HERE = "shipped, NVRTC 13.4.92", "compiled here, NVRTC 13.0"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoadingDriver]:
    """A driver, two shipped kernels, and a compiler that compiles anything."""
    stand_in = LoadingDriver()
    monkeypatch.setattr(compiling, "FOLDER", tmp_path)
    for header, name in (compiling.SMALLEST, OTHER):
        write_kernel(compiling.shipped_file(tmp_path, header, name), Kernel(b"shipped " + name.encode(), name, "a log", "13.4.92"))
    monkeypatch.setattr(driver, "compile_kernel", lambda header, name: Kernel(b"compiled " + name.encode(), name, "", "13.0"))
    monkeypatch.setattr(driver, "compiler_version", lambda: "13.0")
    monkeypatch.setattr(driver, "cuda_driver", lambda: stand_in)
    monkeypatch.setattr(driver, "on_device", lambda index: nullcontext())
    monkeypatch.setattr(driver, "origins", {})
    forget()
    yield stand_in
    forget()


def forget() -> None:
    for cached in (driver.load_kernel, driver.takes_shipped, compiling.source_key, compiling.sources):
        cached.cache_clear()


def load(header: str, name: str) -> Kernel:
    return driver.load_kernel(0, header, name, 384, 0).kernel


def test_shipped_kernels_are_taken_and_others_compiled(cuda: LoadingDriver) -> None:
    assert load(*OTHER).origin == NEW
    assert load(*UNPACKED).origin == HERE
    assert driver.origins == {"other": NEW, "unpacked": HERE}
    assert driver.usual_origin() == NEW
    assert cuda.asked == [b"shipped end_trips<64, 64>", b"shipped other", b"compiled unpacked"]


@pytest.mark.parametrize("refusal", sorted(driver.CANNOT_LOAD))
def test_a_driver_that_cannot_load_them_gets_all_compiled(cuda: LoadingDriver, capsys: pytest.CaptureFixture[str], refusal: str) -> None:
    cuda.loading = Status(refusal)
    assert load(*OTHER).origin == load(*compiling.SMALLEST).origin == HERE
    assert capsys.readouterr().err.count("this driver cannot load kernels of NVRTC 13.4.92") == 1


def test_another_error_of_the_driver_is_raised(cuda: LoadingDriver) -> None:
    cuda.loading = Status("CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(RuntimeError, match="CUDA_ERROR_OUT_OF_MEMORY: what the driver says"):
        load(*OTHER)


def changed_source(name: str, more: str = "struct Changed;\n") -> dict[str, object]:
    files = {**compiling.sources(), name: compiling.sources()[name] + more}
    return {"sources": lambda: files}


def test_changed_sources_or_options_find_none(cuda: LoadingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    header = compiling.SMALLEST[0]
    for changed in (changed_source(header), changed_source("common/types.cuh"), {"OPTIONS": ("--another",)}):
        with monkeypatch.context() as private:
            for name, value in changed.items():
                private.setattr(compiling, name, value)
            forget_keys()
            assert compiling.shipped_compiler() is None
            assert compiling.shipped_kernel(*compiling.SMALLEST) is None
    forget_keys()
    assert compiling.shipped_compiler() == "13.4.92"  # the control


def test_sources_that_a_kernel_does_not_include_do_not_matter(cuda: LoadingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    key = compiling.source_key(*compiling.SMALLEST)
    for name, is_included in (("forward/consumer.cuh", False), ("common/types.cuh", True)):
        with monkeypatch.context() as private:
            private.setattr(compiling, "sources", changed_source(name)["sources"])
            forget_keys()
            assert (compiling.source_key(*compiling.SMALLEST) != key) == is_included


def test_comments_do_not_matter(cuda: LoadingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    key = compiling.source_key(*compiling.SMALLEST)
    with monkeypatch.context() as private:
        private.setattr(compiling, "sources", changed_source("common/types.cuh", "  // changed\n")["sources"])
        forget_keys()
        assert compiling.source_key(*compiling.SMALLEST) == key


def forget_keys() -> None:
    driver.takes_shipped.cache_clear()
    compiling.source_key.cache_clear()


def test_they_are_found_without_a_compiler(cuda: LoadingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    for cached in (compiling._nvrtc, compiling.compiler_version):
        cached.cache_clear()
    assert load(*OTHER).origin == NEW
    assert compiling.compiler_at_hand() is None
    with pytest.raises(ImportError, match=r"did not come with the package needs .* nvidia-cuda-nvrtc"):
        compiling.compile_kernel(*UNPACKED)


def test_a_damaged_shipped_kernel_is_an_error(cuda: LoadingDriver) -> None:
    damage(compiling.shipped_file(compiling.FOLDER, *OTHER))
    with pytest.raises(RuntimeError, match=r"is damaged, the kernel other that came with dash-attn; install the package again"):
        load(*OTHER)


def test_a_damaged_file_of_the_cache_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DASH_ATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(compiling, "compiler_version", lambda: "13.0")
    monkeypatch.setattr(compiling, "compile_uncached", lambda header, name: Kernel(b"cubin", name, "", "13.0"))
    compiling.compile_kernel(*OTHER)
    compiling.compile_kernel(*OTHER)
    assert capsys.readouterr().err.count("compiling") == 1  # the control: a sound one is kept
    (file,) = tmp_path.iterdir()
    damage(file)
    assert compiling.compile_kernel(*OTHER).cubin == b"cubin"
    assert "is damaged; compiling it again" in capsys.readouterr().err


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    kernel = Kernel(b"\0cubin\0with zeros\0", "symbol", "log\nof lines", "13.4.92")
    write_kernel(tmp_path / "a.cubin", kernel)
    assert read_kernel(tmp_path / "a.cubin") == kernel
    assert [file.name for file in tmp_path.iterdir()] == ["a.cubin"]
    assert read_kernel(tmp_path / "b.cubin") is None


def test_turns_see_which_of_the_two_runs(cuda: LoadingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked before CUDA is used, machine_code assumes that the shipped ones load; it does not remember that."""
    before = devices.machine_code()
    assert before.endswith(NEW)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert devices.machine_code() == before
    cuda.loading = Status("CUDA_ERROR_NO_BINARY_FOR_GPU")
    driver.takes_shipped.cache_clear()
    assert devices.machine_code() == before.replace(NEW, HERE)


def test_doctor_and_certificates_tell(cuda: LoadingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert Snapshot().kernels == f"none loaded yet; {NEW}"
    load(*OTHER), load(*UNPACKED)
    assert Snapshot().kernels == f"1 {HERE}; 1 {NEW}"
    monkeypatch.setattr(compiling, "compiler_version", lambda: "13.0")
    found = version_facts("cuda", "hopper")
    assert (found["nvrtc"], found["packed_nvrtc"]) == ("13.0", "13.4.92")
    monkeypatch.setattr(compiling, "FOLDER", Path("/nowhere"))
    driver.origins.clear()
    assert "none came with the package" in str(Snapshot().kernels)


def test_an_explanation_tells() -> None:
    shape = (1, 256, 2, 64)
    q = torch.empty(shape, device="meta", dtype=torch.bfloat16)
    asked = explain(flash_attn_func, q, q, q, backend="hopper")
    hashes = {"forward": "a" * 64, "backward": "b" * 64}
    same = replace(asked, kernels=hashes, kernel_origins=dict.fromkeys(hashes, NEW))
    assert str(same).splitlines()[-1] == f"kernels       forward {'a' * 12}, backward {'b' * 12} ({NEW})"
    mixed = replace(same, kernel_origins={"forward": NEW, "backward": HERE})
    assert str(mixed).splitlines()[-1] == f"kernels       forward {'a' * 12} ({NEW}); backward {'b' * 12} ({HERE})"
    assert mixed == same, "hashes decide bits, not who compiled"
    assert mixed != replace(same, kernels={**hashes, "backward": "c" * 64})
