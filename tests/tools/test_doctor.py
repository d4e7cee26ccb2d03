"""Every check finds its planted fault and nothing else, and a sound process has no finding."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

import dash_attn
from dash_attn.cli.doctor import is_bad, remarks_for_flags
from dash_attn.cli.main import main
from dash_attn.tools.doctor import CHECKS, Finding, Snapshot, examine, print_findings
from dash_attn.tools.doctor.checks import backend_in_words
from dash_attn.tools.machine import Gpu

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "PYTHONHASHSEED": "0",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_NVLS_ENABLE": "0",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
SOUND_CPU = Snapshot(
    deterministic=True,
    warn_only=False,
    fill_uninitialized=True,
    tf32=(),
    reduced_precision=(),
    cudnn_benchmark=False,
    cudnn_deterministic=True,
    max_autotune=False,
    sdpa=(),
    environment={"PYTHONHASHSEED": "0"},
    started_with=None,
    modules=frozenset(),
    cuda=False,
    cuda_initialized=False,
    gpu=None,
    cuda_bindings=True,
    triton=True,
    kernels=None,
    torch_version="2.9.0",
    world_size=1,
)
SOUND = replace(
    SOUND_CPU,
    environment=VARIABLES,
    started_with=VARIABLES,
    modules=frozenset({"torch", "transformer_engine"}),
    cuda=True,
    cuda_initialized=True,
    gpu=Gpu("NVIDIA H100", (9, 0)),
    sdpa=("cudnn", "mem_efficient"),
    world_size=8,
)


def variables(**changes: str | None) -> dict[str, Any]:
    """A changed environment that was there from the start."""
    changed = {name: value for name, value in {**VARIABLES, **changes}.items() if value is not None}
    return {"environment": changed, "started_with": changed}


PLANTED = [
    ("deterministic-algorithms", {"deterministic": False, "sdpa": ()}, "is off"),
    ("warn-only", {"warn_only": True, "sdpa": ()}, "warn_only=True"),
    ("cudnn-benchmark", {"cudnn_benchmark": True}, "benchmark is True"),
    ("max-autotune", {"max_autotune": True}, "config.max_autotune is True"),
    ("max-autotune-variable", variables(TORCHINDUCTOR_MAX_AUTOTUNE="1"), "TORCHINDUCTOR_MAX_AUTOTUNE=1"),
    ("other-attention", {"modules": frozenset({"xformers", "flash_attn"})}, "flash_attn, xformers"),
    ("other-attention", {"modules": frozenset({"flash_attn_interface"})}, "flash_attn_interface"),
    ("tf32", {"tf32": ("matmul",)}, "matmul"),
    ("reduced-precision-sums", {"reduced_precision": ("bf16",)}, "bf16"),
    ("uninitialized-memory", {"fill_uninitialized": False}, "is False"),
    ("cublas-workspace", variables(CUBLAS_WORKSPACE_CONFIG=None), "not set"),
    ("cublas-workspace", variables(CUBLAS_WORKSPACE_CONFIG=":4096:2"), ":4096:2"),
    ("late-environment", {"environment": {**VARIABLES, "NCCL_DEBUG": "INFO"}}, "NCCL_DEBUG"),
    ("late-environment", {"started_with": {"PYTHONHASHSEED": "0"}}, "CUBLAS_WORKSPACE_CONFIG, NCCL_ALGO"),
    ("late-hash-seed", {"environment": {**VARIABLES, "PYTHONHASHSEED": "1"}}, "is 1 now"),
    ("nccl-algorithm", variables(NCCL_ALGO=None, NCCL_PROTO=None), "8 ranks, not set: NCCL_ALGO, NCCL_PROTO"),
    ("nccl-algorithm", variables(NCCL_NVLS_ENABLE=None), "not set: NCCL_NVLS_ENABLE"),
    ("transformer-engine", variables(NVTE_ALLOW_NONDETERMINISTIC_ALGO="1"), "is 1"),
    ("transformer-engine", variables(NVTE_ALLOW_NONDETERMINISTIC_ALGO=None), "not set"),
    ("torch-version", {"torch_version": "2.8.1+cu128"}, "2.8.1"),
    ("cuda-bindings", {"cuda_bindings": False}, "cuda-bindings"),
    ("kernel-origin", {"kernels": "4 shipped, NVRTC 13.4.92; 1 compiled here, NVRTC 13.0"}, "1 compiled here"),
    ("gpu-model", {"gpu": Gpu("NVIDIA A100", (8, 0))}, "A100 has compute capability 8.0"),
    ("gpu-too-old", {"gpu": Gpu("Tesla T4", (7, 5))}, "T4 has compute capability 7.5"),
    ("triton-missing", {"gpu": Gpu("NVIDIA L40S", (8, 9)), "triton": False}, "8.9, and Triton is not installed"),
    ("hash-seed", variables(PYTHONHASHSEED=None), "not set"),
    ("hash-seed", variables(PYTHONHASHSEED="random"), "random"),
]


@pytest.mark.parametrize(("check", "changes", "said"), PLANTED)
def test_a_planted_fault_is_the_only_finding(check: str, changes: dict[str, Any], said: str) -> None:
    (finding,) = examine(replace(SOUND, **changes))
    assert finding.id == check
    assert said in finding.found


def test_faults_that_come_with_another() -> None:
    ids = {finding.id for finding in examine(replace(SOUND, deterministic=False, cudnn_deterministic=False))}
    assert ids == {"deterministic-algorithms", "cudnn-deterministic", "sdpa-backends"}


def test_every_check_is_planted() -> None:
    assert {check for check, *_ in PLANTED} | {"cudnn-deterministic", "sdpa-backends"} == set(CHECKS)


@pytest.mark.parametrize("snapshot", [SOUND, SOUND_CPU], ids=["gpu", "cpu"])
def test_a_sound_process_has_no_finding(snapshot: Snapshot) -> None:
    assert examine(snapshot) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"cudnn_deterministic": False},  # deterministic algorithms cover cuDNN
        {"tf32": ("matmul",), "environment": {**VARIABLES, "NVIDIA_TF32_OVERRIDE": "0"}, "started_with": None},
        {"environment": VARIABLES, "started_with": {"PYTHONHASHSEED": "0"}, "cuda_initialized": False, "world_size": 1},  # in time
        {"torch_version": "2.10.0"},  # later than 2.9, though not as text
        {**variables(NVTE_ALLOW_NONDETERMINISTIC_ALGO=None), "modules": frozenset({"torch"})},
        {**variables(NCCL_ALGO=None), "world_size": 1},
        {"triton": False},  # a Hopper GPU does not need it
    ],
)
def test_what_only_looks_like_a_fault(changes: dict[str, Any]) -> None:
    assert examine(replace(SOUND, **changes)) == []


def test_cuda_bindings_are_for_hopper_gpus_alone() -> None:
    findings = examine(replace(SOUND, gpu=Gpu("NVIDIA L40S", (8, 9)), cuda_bindings=False))
    assert [finding.id for finding in findings] == ["gpu-model"]


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        (Gpu("NVIDIA H200", (9, 0)), "backend hopper for CUDA tensors: NVIDIA H200 has compute capability 9.0"),
        (Gpu("NVIDIA B200", (10, 0)), "backend triton for CUDA tensors: NVIDIA B200 has compute capability 10.0"),
        (Gpu("AMD Instinct MI210", (9, 0), amd=True), "backend triton for CUDA tensors: AMD Instinct MI210 is an AMD GPU"),
        (Gpu("Tesla T4", (7, 5)), "backend cpu only: Tesla T4 has compute capability 7.5"),
        (None, "backend: CUDA is not initialised"),
    ],
)
def test_the_doctor_says_which_backend_a_gpu_gets(gpu: Gpu | None, said: str) -> None:
    assert backend_in_words(replace(SOUND, gpu=gpu)).startswith(said)
    assert backend_in_words(SOUND_CPU) == "backend cpu: PyTorch finds no GPU"


def test_errors_come_first_and_only_they_and_warnings_are_bad() -> None:
    findings = examine(replace(SOUND, tf32=("matmul",), warn_only=True, cudnn_benchmark=True, sdpa=()))
    assert [finding.severity for finding in findings] == ["error", "warning", "info"]
    assert is_bad(findings[1:])
    assert not is_bad(findings[2:])
    with pytest.raises(FrozenInstanceError):
        findings[0].severity = "info"  # type: ignore[misc]


REAL = [
    ("torch.use_deterministic_algorithms(False)", "deterministic-algorithms"),
    ("torch.use_deterministic_algorithms(True, warn_only=True)", "warn-only"),
    ("torch.utils.deterministic.fill_uninitialized_memory = False", "uninitialized-memory"),
    ("os.environ['PYTHONHASHSEED'] = '5'", "late-hash-seed"),
    ("os.environ['TORCHINDUCTOR_MAX_AUTOTUNE'] = '1'", "max-autotune-variable"),
    ("sys.modules['torch._inductor.config'] = types.SimpleNamespace(max_autotune=True)", "max-autotune"),
    ("sys.modules['flash_attn'] = types.ModuleType('flash_attn')", "other-attention"),
    ("sys.modules['transformer_engine'] = types.ModuleType('transformer_engine')", "transformer-engine"),
    ("torch.__version__ = '2.7.0'", "torch-version"),
    ("torch.cuda.is_available = lambda: True", "cublas-workspace"),
    ("torch.cuda.is_available = lambda: True; torch.backends.cudnn.benchmark = True", "cudnn-benchmark"),
    ("torch.cuda.is_available = lambda: True; torch.backends.cuda.matmul.allow_tf32 = True", "tf32"),
    ("torch.cuda.is_available = lambda: True; torch.backends.fp32_precision = 'tf32'", "tf32"),
    ("os.environ['NCCL_ALGO'] = 'Tree'; torch.cuda.is_initialized = lambda: True", "late-environment"),
]


def clean_environment(**more: str) -> dict[str, str]:
    prefixes = ("NCCL_", "CUBLAS", "NVTE_", "TORCHINDUCTOR", "PYTHONHASHSEED")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)} | {"PYTHONHASHSEED": "0"} | more


def run_python(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, env=clean_environment(**more))


@pytest.mark.slow
def test_planted_for_real() -> None:
    """One process for all faults, each in a fork of it, so that torch is imported once."""
    code = """
import json, os, sys, types, torch, dash_attn
torch.use_deterministic_algorithms(True)
torch.cuda.is_available = lambda: False
for plant in ["pass", *json.loads(sys.argv[1])]:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        exec(plant)
        print(json.dumps([finding.id for finding in dash_attn.doctor()]), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, plant
"""
    done = run_python("-c", code, json.dumps([plant for plant, _ in REAL]))
    assert done.returncode == 0, done.stderr
    sound, *found = map(json.loads, done.stdout.splitlines())
    assert sound == []
    for (plant, check), ids in zip(REAL, found, strict=True):
        assert check in ids, plant


def test_command_in_a_sound_environment_and_with_a_fault() -> None:
    command = ("-m", "dash_attn.cli.main", "doctor", "--json")
    sound = run_python(*command, CUDA_VISIBLE_DEVICES="")
    assert sound.returncode == 0, sound.stdout + sound.stderr
    said = json.loads(sound.stdout)
    assert list(said) == ["doctor", "versions", "gpu", "backend", "findings"]
    assert (said["doctor"], said["gpu"], said["backend"]) == (1, None, "cpu")
    assert said["versions"].items() >= {"python": platform.python_version(), "dash_attn": dash_attn.__version__}.items()
    assert {"torch", "numpy"} <= said["versions"].keys()
    assert all(isinstance(version, str) and version for version in said["versions"].values())
    assert {finding["severity"] for finding in said["findings"]} == {"info"}
    assert "dash_attn.doctor(show=True)" in sound.stderr
    faulty = run_python(*command, CUDA_VISIBLE_DEVICES="", TORCHINDUCTOR_MAX_AUTOTUNE="1")
    assert faulty.returncode == 1
    first = json.loads(faulty.stdout)["findings"][0]
    assert (first["id"], first["severity"]) == ("max-autotune-variable", "error")
    assert list(first) == ["id", "severity", "scope", "found", "why", "fix", "reference"]


def test_flags_are_remarks_in_the_command_only() -> None:
    findings = examine(replace(SOUND, deterministic=False, torch_version="2.1"))
    shown = remarks_for_flags(findings)
    assert {finding.id for finding in findings if finding.severity != "info"} == {
        "deterministic-algorithms",
        "sdpa-backends",
        "torch-version",
    }
    assert [finding.id for finding in shown if finding.severity != "info"] == ["torch-version"]
    assert len(shown) == len(findings)


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    findings = examine(replace(SOUND, cudnn_benchmark=True))
    print_findings(findings)
    out = capsys.readouterr().out
    assert "cudnn-benchmark" in out
    assert "torch.backends.cudnn.benchmark = False" in " ".join(out.split())
    assert out.endswith("Found: 1 error, 0 warning, 0 info\n")
    assert "see: PyTorch documentation" in out
    print_findings([])
    assert capsys.readouterr().out.startswith("No error, no warning")


def test_the_function_returns_findings_and_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    findings = dash_attn.doctor(show=True)
    with pytest.raises(TypeError, match="show must be True or False; got 'x'"):
        dash_attn.doctor(show="x")  # type: ignore[arg-type]
    out = capsys.readouterr().out
    assert all(isinstance(finding, Finding) for finding in findings)
    assert "deterministic-algorithms" in {finding.id for finding in findings}
    assert "deterministic-algorithms" in out
    assert callable(dash_attn.doctor)  # still the function after its package was imported


def test_the_command_says_what_it_cannot_see(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    said = capsys.readouterr().out
    assert "seen only from inside it: call dash_attn.doctor(show=True)" in said
    assert "\nbackend " in said


def test_the_page_lists_every_check_as_the_code_has_it() -> None:
    rows = [f"| `{id}` | {c.severity} | {c.scope} | {c.why} | {c.fix} | {c.reference} |" for id, c in CHECKS.items()]
    head = ["| check | severity | scope | why it matters | fix | reference |", "|---|---|---|---|---|---|"]
    assert "\n".join([*head, *rows]) in PAGE.read_text()
    for check in CHECKS.values():
        assert all((check.why, check.fix, check.reference))
        assert "|" not in check.why + check.fix + check.reference
