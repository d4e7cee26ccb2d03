"""One combination of Python, PyTorch and other libraries at a time: makes an environment for it, runs a fixed list of tests there, and
writes the outcome to tools/compatibility.json, of which `make pages` makes docs/compatibility.md.

    python tools/compatibility.py --list
    python tools/compatibility.py torch-2.9  # its Python must be on the PATH, as python3.12; some GB of downloads

A row is replaced when it is run again. The environment is in a temporary folder, and goes when the row is written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")
LIMIT = 180  # seconds of all tests, on two cores that do nothing else
TESTS = {  # by room or door; none needs a GPU
    "schedules": ("tests/scheduling/test_golden.py",),
    "attention": ("tests/attention/test_determinism.py", "tests/attention/test_one_forward.py"),
    "torch.compile": ("tests/attention/test_ops.py",),
    "SDPA": ("tests/integrations/test_sdpa.py",),
    "flash operators": ("tests/integrations/test_torch_flash.py",),
    "transformers": ("tests/integrations/test_huggingface.py", "tests/integrations/test_generate.py"),
    "Megatron-Core": ("tests/integrations/test_megatron_core.py",),
    "invariance": ("tests/invariance/test_rows.py", "tests/invariance/test_models.py"),
    "ledger": ("tests/ledgers/test_ledger_recording.py", "tests/integrations/test_trainer_ledger.py"),
    "Triton": ("tests/backends/test_triton_interpreted.py", "tests/backends/test_triton_compile.py"),
}
RUNNERS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
LIBRARIES = ("numpy", "torch", "triton", "transformers", "accelerate", "megatron-core", "cuda-bindings")
NVRTC_OF, NVRTC_12 = "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"
CUDA_12 = {"cuda-bindings": "12.9.4", NVRTC_OF: ""}
BY_TORCH = {"triton": "", "cuda-bindings": "", NVRTC_OF: ""}  # its CUDA builds bring them


@dataclass(frozen=True)
class Combination:
    """versions: where they are not those that `make test` installs; an empty one is left to pip, which may find that nothing needs it."""

    python: str
    versions: dict[str, str] = field(default_factory=dict)
    runs: bool = True  # else kernels are compiled, and nothing runs

    def __str__(self) -> str:
        versions = (f"{name} {version or 'as required'}" for name, version in self.versions.items())
        return f"Python {self.python} {', '.join(versions)}"

    @property
    def required(self) -> list[str]:
        names = dict.fromkeys((*(LIBRARIES if self.runs else ("torch", "numpy", "cuda-bindings")), *self.versions))
        named = [f"{name}=={self.versions[name]}" if self.versions.get(name) else name for name in names if name != NVRTC_OF]
        return [*(name for name in named if self.versions.get(name) != ""), *RUNNERS]

    @property
    def nvrtc(self) -> str:
        """Installed last and alone, as the Makefile does. Empty: what PyTorch brings."""
        from build_with_kernels import NVRTC

        return self.versions.get(NVRTC_OF, NVRTC)

    def constraints(self) -> str:
        lines = (ROOT / "constraints-dev.txt").read_text(encoding="utf-8").splitlines()
        return "\n".join(line for line in lines if line.split("==")[0] not in self.versions)


COMBINATIONS = {
    "pinned": Combination("3.11"),
    **{f"python-3.{minor}": Combination(f"3.{minor}") for minor in (10, 12, 13)},  # with PyTorch's CUDA build
    "oldest": Combination("3.10", {"torch": "2.9.0", **BY_TORCH, **CUDA_12, "numpy": "1.24.4", "transformers": "5.6.0"}),
    "newest": Combination("3.13", {"torch": "2.15.0", **BY_TORCH, "numpy": ""}),
    "torch-2.9": Combination("3.12", {"torch": "2.9.1", **BY_TORCH, **CUDA_12, "numpy": "2.2.6"}),
    "as-on-gpus": Combination("3.12", {"torch": "2.11.0", **BY_TORCH, "numpy": "2.5.2", "transformers": "5.17.0"}),  # of most GPU figures
    **{f"torch-2.{minor}": Combination("3.12", {"torch": f"2.{minor}.0", **BY_TORCH}) for minor in (10, 11, 12, 14, 15)},
    **{f"transformers-{version}": Combination("3.11", {"transformers": version}) for version in ("5.6.0", "5.17.0")},
    **{f"triton-{version}": Combination("3.11", {"triton": version}) for version in ("3.7.0", "3.8.0", "3.9.0")},
    "triton-3.4.0": Combination("3.11", {"triton": "3.4.0", "numpy": "2.2.6"}),  # its interpreter fails with numpy 2.4
    **{f"nvrtc-{version}": Combination("3.11", {**CUDA_12, NVRTC_12: version}, False) for version in ("12.6.85", "12.8.93", "12.9.86")},
    **{f"nvrtc-{version}": Combination("3.11", {NVRTC_OF: version}, False) for version in ("13.0.88", "13.5.37")},
}


# ---- an environment


def run(name: str, limit: float) -> dict[str, Any]:
    """The row of a combination."""
    start, asked = time.monotonic(), COMBINATIONS[name]
    with TemporaryDirectory(prefix="dash-attn-") as folder:
        python = made(asked, Path(folder))
        row: dict[str, Any] = {"commit": commit(), "versions": versions(python), "compiled": compiled(python, Path(folder))}
        if asked.runs:
            row["tests"] = tested(python, Path(folder), limit)
    return {**row, "seconds": round(time.monotonic() - start)}


def made(asked: Combination, folder: Path) -> Path:
    """Its Python, with everything installed."""
    found = shutil.which(f"python{asked.python}")
    if found is None:
        sys.exit(f"needs Python {asked.python} on the PATH, as python{asked.python}")
    subprocess.run([found, "-m", "venv", str(folder / "env")], check=True)
    python, constraints = folder / "env/bin/python", folder / "constraints.txt"
    constraints.write_text(asked.constraints(), encoding="utf-8")
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    subprocess.run([*install, "--constraint", str(constraints), *asked.required], check=True)
    if asked.nvrtc:
        subprocess.run([*install, "--no-deps", f"{NVRTC_OF}=={asked.nvrtc}"], check=True)
    return python


def environment(folder: Path) -> dict[str, str]:
    """With empty caches, and our sources."""
    caches = {name: str(folder / name) for name in ("DASH_ATTN_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
    paths = os.pathsep.join(str(ROOT / place) for place in ("src", ".", "tests/helpers"))
    return {**os.environ, **caches, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def versions(python: Path) -> dict[str, str]:
    """What is there, by pip's names; CUDA is that of PyTorch's build."""
    asks = (
        "import json, platform, torch; from importlib.metadata import distributions;"
        "print(json.dumps({'python': platform.python_version(), 'cuda': torch.version.cuda or '',"
        " **{d.metadata['Name'].lower(): d.version for d in distributions()}}))"
    )
    found = json.loads(subprocess.run([str(python), "-c", asks], check=True, capture_output=True, text=True).stdout)
    return {name: found[name] for name in ("python", "cuda", *LIBRARIES, NVRTC_OF, NVRTC_12) if found.get(name)}


def commit() -> str:
    """With a + where sources or tests differ from it."""
    head = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], check=True, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    changed = ["git", "status", "--porcelain", "--untracked-files=no", "--", "src", "tests"]
    return head + ("+" if subprocess.run(changed, check=True, capture_output=True, cwd=ROOT).stdout else "")


# ---- tests


def tested(python: Path, folder: Path, limit: float) -> dict[str, Any]:
    """Of each room or door, how many tests passed and were skipped, and which failed; and seconds of all."""
    report, start = folder / "report.xml", time.monotonic()
    files = [path for paths in TESTS.values() for path in paths]
    options = ["-n", "2", "--dist", "worksteal", "-m", "not exhaustive", "-p", "no:cacheprovider", f"--junitxml={report}"]
    try:
        subprocess.run([str(python), "-m", "pytest", *options, *files], cwd=ROOT, env=environment(folder), timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"stopped": limit}
    return {**counted(report.read_text(encoding="utf-8")), "seconds": round(time.monotonic() - start)}


def counted(report: str) -> dict[str, Any]:
    room_of = {path.removesuffix(".py").replace("/", "."): room for room, paths in TESTS.items() for path in paths}
    found: dict[str, Any] = {room: {"passed": 0, "skipped": [], "failed": []} for room in TESTS}
    for case in ElementTree.fromstring(report).iter("testcase"):
        module, name = case.get("classname") or case.get("name", ""), case.get("name", "")  # a module that fails or is skipped has one only
        kinds = {part.tag: part for part in case}
        room = found[room_of[module]]
        if "failure" in kinds or "error" in kinds:
            room["failed"].append(f"{module.split('.')[-1]}::{name}")
        elif "skipped" in kinds:
            why, text = kinds["skipped"].get("message", ""), (kinds["skipped"].text or "").strip()  # of a module the text alone says it
            room["skipped"].append(text.rpartition("Skipped: ")[2][:-2] if why == "collection skipped" else why)
        else:
            room["passed"] += 1
    return {room: {**counts, "skipped": dict(Counter(counts["skipped"]))} for room, counts in found.items()}


# ---- kernels for Hopper GPUs


def compiled(python: Path, folder: Path) -> dict[str, Any] | None:
    """What the environment's NVRTC makes of one variant of each kernel. None without an NVRTC, or without its bindings."""
    done = subprocess.run(
        [str(python), __file__, "--compile"], cwd=ROOT, env=environment(folder), capture_output=True, text=True, check=False
    )
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def one_of_each() -> Iterator[tuple[str, str]]:
    from kernel_variants import VARIANTS

    yield from {name.split("<")[0]: (header, name) for header, name in reversed(VARIANTS)}.values()


def complaint(variant: tuple[str, str]) -> str:
    """Nothing, or what became of a kernel instead of machine code that spills nothing."""
    from dash_attn.backends.hopper.driver.compile import compile_uncached
    from kernel_variants import allowed_bytes, assembler_complaints

    try:
        spilled = assembler_complaints(compile_uncached(*variant).log, allowed_bytes(variant[1]))
    except Exception as error:
        return f"{variant[1]}: {str(error).splitlines()[0]}"
    return f"{variant[1]} spills" if spilled else ""


def compile_here() -> None:
    from dash_attn.backends.hopper.driver.compile import compiler_version

    variants = list(one_of_each())
    with ProcessPoolExecutor(2) as pool:
        complaints = list(filter(None, pool.map(complaint, variants)))
    print(json.dumps({"nvrtc": compiler_version(), "kernels": len(variants), "complaints": complaints}))


# ---- the command


def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    return found


def listing() -> str:
    """Every combination, and the commit at which it was run."""
    rows = record()
    return "\n".join(f"{name:20} {rows.get(name, {}).get('commit', '-'):10} {asked}" for name, asked in COMBINATIONS.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("combination", nargs="?", choices=COMBINATIONS)
    parser.add_argument("--list", action="store_true", help="show the combinations, with the commit at which each was run")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of all tests (default %(default)s); more on a busy machine")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.compile:
        compile_here()
    elif asked.list or asked.combination is None:
        print(listing())
    else:
        row = run(asked.combination, asked.limit)
        rows = {**record(), asked.combination: row}
        ordered = {name: rows[name] for name in COMBINATIONS if name in rows}
        RECORD.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
