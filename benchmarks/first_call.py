"""How long the first call of a fresh process takes from a wheel, and which kernels it runs: python -m benchmarks.first_call dist/*.whl

Needs a Hopper GPU. Time begins when PyTorch has started, made a context, and run a forward and a backward of its own. The wheel is
unpacked into a folder of its own. The same call without NVRTC must have the same hashes and bits; without the packed kernels it compiles.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from shutil import rmtree
from statistics import median
from typing import Any

PROCESSES = 5
MOST_SECONDS = 0.5

CALL = """
import hashlib, json, sys, time
if sys.argv[1] == "without NVRTC":
    sys.modules["cuda.bindings.nvrtc"] = None
import torch
torch.manual_seed(0)
q = torch.randn(2, 1024, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
k, v = (torch.randn(2, 1024, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
(q.square().sum() + k.square().sum() + v.square().sum()).backward()
q.grad = k.grad = v.grad = None
torch.cuda.synchronize()
start = time.perf_counter()
import dash_attn
out = dash_attn.flash_attn_func(q, k, v, causal=True)
out.square().sum().backward()
torch.cuda.synchronize()
seconds = time.perf_counter() - start
tensors = (out, q.grad, k.grad, v.grad)
bits = hashlib.sha256(b"".join(x.detach().cpu().view(torch.uint8).numpy().tobytes() for x in tensors)).hexdigest()[:16]
told = dash_attn.explain(dash_attn.flash_attn_func, q, k, v, causal=True)
from dash_attn.tools.machine import version_facts
found = [finding.found for finding in dash_attn.doctor() if finding.id == "kernel-origin"]
print(json.dumps([seconds, bits, told.kernels, told.kernel_origins, found, version_facts("cuda", "hopper")]))
"""


def fresh_process(setting: str, package: Path) -> list[Any]:
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPATH": str(package), "DASH_ATTN_CACHE": cache}
        done = subprocess.run([sys.executable, "-c", CALL, setting], env=environment, capture_output=True, text=True, timeout=300, cwd="/")
        if done.returncode:
            raise RuntimeError(f"{setting}: {done.stderr[-2000:]}")
        if setting != "nothing packed" and os.listdir(cache):
            raise RuntimeError(f"{setting}: something was compiled: {done.stderr[-2000:]}")
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(setting: str, runs: list[list[Any]]) -> None:
    seconds = [run[0] for run in runs]
    print(f"\n{setting}: median {median(seconds):.3f} s of {[round(s, 3) for s in seconds]}")
    _, bits, kernels, origins, doctor, versions = runs[-1]
    print(f"  bits {bits}, doctor: {doctor}, certificate: NVRTC {versions['nvrtc']}, packed {versions['packed_nvrtc']}")
    for name, digest in kernels.items():
        print(f"  {name:12} {digest[:16]} {origins[name]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder)
        with zipfile.ZipFile(wheel) as file:
            file.extractall(package)
        found = {setting: [fresh_process(setting, package) for _ in range(PROCESSES)] for setting in ("with NVRTC", "without NVRTC")}
        rmtree(package / "dash_attn/backends/hopper/shipped")
        control = fresh_process("nothing packed", package)
    for setting, runs in (*found.items(), ("nothing packed", [control])):
        report(setting, runs)
    same = {(run[1], *run[2].values()) for runs in found.values() for run in runs}
    slow = max(median(run[0] for run in runs) for runs in found.values())
    print(f"\n{'one' if len(same) == 1 else len(same)} set of bits and hashes; slowest median {slow:.3f} s, wanted below {MOST_SECONDS} s")
    return 0 if len(same) == 1 and slow < MOST_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
