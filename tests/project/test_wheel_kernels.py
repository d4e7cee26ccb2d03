"""A wheel with compiled kernels: a clean environment without NVRTC compiles nothing for README's call."""

from __future__ import annotations

import json
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from wheels import ROOT, build, copy_tree, install, run

pytest.importorskip("build")
pytest.importorskip("setuptools")
pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")

import build_with_kernels
from build_with_kernels import NVRTC, get_requires_for_build_sdist
from dash_attn.backends.hopper.driver.compile import SMALLEST
from kernel_variants import VARIANTS
from readme_call import KV, Q, readme_kernels
from ship_kernels import SELDOM, SHIPPED, UNORDERED, ship

HELPERS = str(ROOT / "tests" / "helpers")
INSTALLED_NVRTC = metadata.version("nvidia-cuda-nvrtc")
MOST_BYTES = 13 * 2**20  # of a wheel

LOAD_THEM = """
import json, sys
from contextlib import nullcontext
sys.modules["cuda.bindings.nvrtc"] = None  # as if it were not installed
from dash_attn.backends.hopper.calls.kernel_names import KernelName
from dash_attn.backends.hopper.driver import launch as driver
from loading_driver import LoadingDriver
from readme_call import readme_kernels

driver.cuda_driver, driver.on_device = LoadingDriver, lambda index: nullcontext()
asked = [KernelName(*variant) for variant in json.loads(sys.argv[1])] or readme_kernels()
hashes = {kernel.name: kernel.load(0).kernel.sha256 for kernel in asked}
print(json.dumps([driver.origins, hashes]))
"""


def load_installed(folder: Path, cache: Path, variants: list[tuple[str, str]] | None = None) -> tuple[dict[str, str], dict[str, str]]:
    """Origins and hashes of kernels (README's if none are given), in a process that has the installed package and no compiler."""
    command = [sys.executable, "-c", LOAD_THEM, json.dumps(variants or [])]
    paths = f"{folder}:{HELPERS}"
    origins, hashes = json.loads(run(*command, PYTHONPATH=paths, DASH_ATTN_CACHE=str(cache)))
    return origins, hashes


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With README's kernels alone, by the NVRTC at hand: a release has all, by one NVRTC."""
    tree = copy_tree(tmp_path_factory.mktemp("tree"))
    variants = [(kernel.header, kernel.name) for kernel in readme_kernels()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DASH_ATTN_CACHE", str(tmp_path_factory.mktemp("cache")))
        ship([*variants, SMALLEST], tree / "src/dash_attn/backends/hopper/shipped")
    return install(build(tree, "--wheel"), tmp_path_factory.mktemp("installed"))


def test_readmes_call_is_the_one_tested() -> None:
    readme = (ROOT / "README.md").read_text()
    assert f"torch.randn({', '.join(map(str, Q))}, device" in readme
    assert f"torch.randn({', '.join(map(str, KV))}, device" in readme
    assert "flash_attn_func(q, k, v, causal=True)" in readme


def test_readmes_call_compiles_nothing(installed: Path, tmp_path: Path) -> None:
    origins, hashes = load_installed(installed, tmp_path / "cache")
    assert set(origins) == {kernel.name for kernel in readme_kernels()}
    assert set(origins.values()) == {f"shipped, NVRTC {INSTALLED_NVRTC}"}
    assert len(set(hashes.values())) == len(hashes)
    assert not (tmp_path / "cache").exists(), "nobody looked for a compiled one"


def test_another_kernel_would_be_compiled(installed: Path, tmp_path: Path) -> None:
    """The control: there is no compiler, so it fails and says what is missing."""
    with pytest.raises(AssertionError, match="compiling a kernel that did not come with the package needs cuda-bindings and NVRTC"):
        load_installed(installed, tmp_path, [("backward/ending.cuh", "end_trips<128, 128>")])


def test_which_kernels_are_shipped() -> None:
    left_out = [variant for variant in VARIANTS if variant not in SHIPPED]
    assert SMALLEST in SHIPPED
    assert all(UNORDERED.match(name) or name.endswith("Band, true>") or (header, name) in SELDOM for header, name in left_out)
    assert not [name for _, name in SHIPPED if UNORDERED.match(name)]
    assert len(SHIPPED) > len([variant for variant in left_out if variant not in SELDOM]) > 10
    dropout = "attention_backward_modified<bf16, 128, 128, false, MaskKind::Band, true, false>"
    assert ("backward/attention.cuh", dropout) in SHIPPED
    assert ("backward/attention.cuh", dropout.replace("true, false>", "true, true>")) in SELDOM
    with pytest.raises(ValueError, match="must be shipped"):
        ship(SHIPPED[:1], Path("/nowhere"))


def test_shipping_needs_no_torch() -> None:
    """An isolated build has numpy and NVRTC alone."""
    code = "import sys; sys.modules['torch'] = None; import ship_kernels; print(len(ship_kernels.SHIPPED))"
    paths = f"{ROOT / 'src'}:{ROOT / 'tools'}:{HELPERS}"
    assert int(run(sys.executable, "-c", code, PYTHONPATH=paths)) == len(SHIPPED)


def test_one_compiler_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build_with_kernels.build_meta, "get_requires_for_build_sdist", lambda settings: [])  # it writes into the tree
    monkeypatch.chdir(ROOT)
    assert f"nvidia-cuda-nvrtc=={NVRTC}" in get_requires_for_build_sdist()
    monkeypatch.chdir(tmp_path)
    assert get_requires_for_build_sdist() == [], "an unpacked source distribution has them"


def test_tests_compile_with_the_compiler_of_the_wheel() -> None:
    """Installed last and alone: PyTorch's CUDA builds ask for another one, so that no constraint may name it."""
    asked = run("make", "--dry-run", "--always-make", "-C", str(ROOT), "VENV=elsewhere", "elsewhere/installed")
    installs = [line for line in asked.splitlines() if "pip install" in line]
    assert installs[-1] == f"elsewhere/bin/pip install -q --no-deps nvidia-cuda-nvrtc=={NVRTC}"
    assert "nvrtc" not in "".join(line for line in (ROOT / "constraints-dev.txt").read_text().splitlines() if not line.startswith("#"))
    assert f"nvidia-cuda-nvrtc=={NVRTC} " in (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.exhaustive
@pytest.mark.skipif(INSTALLED_NVRTC != NVRTC, reason=f"the kernels in the wheel are made by NVRTC {NVRTC}")
def test_a_release_has_every_kernel(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path)
    wheel = build(tree, limit=3600)
    (source,) = (tree / "dist").glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as one, tarfile.open(source) as other:
        in_wheel, in_source = ([name for name in names if name.endswith(".cubin")] for names in (one.namelist(), other.getnames()))
    assert len(in_wheel) == len(in_source) == len(SHIPPED)
    print(f"{wheel.name}: {len(in_wheel)} kernels, {wheel.stat().st_size / 2**20:.1f} MiB")
    assert wheel.stat().st_size < MOST_BYTES
    assert not (tree / "src/dash_attn/backends/hopper/shipped").exists(), "nothing is left beside the sources"
    installed = install(wheel, tmp_path / "installed")
    origins, _ = load_installed(installed, tmp_path / "cache", SHIPPED)
    assert set(origins.values()) == {f"shipped, NVRTC {NVRTC}"}
