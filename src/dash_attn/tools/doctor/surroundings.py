"""Checks of what is there before a training script starts: variables, versions, hardware."""

from __future__ import annotations

import re

from ...backends.gpus import OLDEST
from .check import AUTOTUNE, Check
from .snapshot import Gpu, Snapshot

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_ALLOWED = (":4096:8", ":16:8")
NCCL = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE")
NVTE = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
MAX_AUTOTUNE = "TORCHINDUCTOR_MAX_AUTOTUNE"
HASH_SEED = "PYTHONHASHSEED"
READ_ONCE = (CUBLAS, NVTE, "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE", MAX_AUTOTUNE)
LEAST_TORCH = (2, 9)


def cublas_workspace(snapshot: Snapshot) -> str | None:
    value = snapshot.environment.get(CUBLAS)
    if not snapshot.cuda or value in CUBLAS_ALLOWED:
        return None
    return f"{CUBLAS} is not set" if value is None else f"{CUBLAS}={value}"


def changed_since_start(snapshot: Snapshot) -> list[str]:
    """Variables that libraries read once and that are not what the process was started with."""
    if snapshot.started_with is None:
        return []
    now, then = snapshot.environment, snapshot.started_with
    return sorted(name for name in {*now, *then} if (name in READ_ONCE or name.startswith("NCCL_")) and now.get(name) != then.get(name))


def late_environment(snapshot: Snapshot) -> str | None:
    changed = changed_since_start(snapshot)
    if not changed or not (snapshot.cuda_initialized or snapshot.world_size > 1):
        return None  # nobody has read them yet
    return f"changed since the process started, and CUDA or torch.distributed is already initialised: {', '.join(changed)}"


def late_hash_seed(snapshot: Snapshot) -> str | None:
    if snapshot.started_with is None:
        return None
    now, then = snapshot.environment.get(HASH_SEED), snapshot.started_with.get(HASH_SEED)
    return None if now == then else f"{HASH_SEED} is {now or 'unset'} now, but Python was started with {then or 'none'}"


def hash_seed(snapshot: Snapshot) -> str | None:
    value = snapshot.environment.get(HASH_SEED, "")
    return f"{HASH_SEED} is {value or 'not set'}" if value in ("", "random") else None


def nccl(snapshot: Snapshot) -> str | None:
    missing = [name for name in NCCL if name not in snapshot.environment]
    return f"{snapshot.world_size} ranks, not set: {', '.join(missing)}" if snapshot.world_size > 1 and missing else None


def transformer_engine(snapshot: Snapshot) -> str | None:
    value = snapshot.environment.get(NVTE)
    if "transformer_engine" not in snapshot.modules or value == "0":
        return None
    return f"transformer_engine is imported and {NVTE} is {'not set' if value is None else value}"


def autotune_variable(snapshot: Snapshot) -> str | None:
    value = snapshot.environment.get(MAX_AUTOTUNE, "")
    return f"{MAX_AUTOTUNE}={value}" if value not in ("", "0") else None


def torch_version(snapshot: Snapshot) -> str | None:
    found = re.match(r"(\d+)\.(\d+)", snapshot.torch_version)
    old = found is not None and (int(found[1]), int(found[2])) < LEAST_TORCH
    return f"PyTorch {snapshot.torch_version}" if old else None


def cuda_bindings(snapshot: Snapshot) -> str | None:
    other_gpu = snapshot.gpu is not None and not snapshot.gpu.is_hopper
    return "CUDA is there, cuda-bindings is not" if snapshot.cuda and not snapshot.cuda_bindings and not other_gpu else None


def no_triton(snapshot: Snapshot) -> str | None:
    gpu = snapshot.gpu
    if gpu is None or snapshot.triton or gpu.is_hopper or gpu.capability < OLDEST:
        return None
    return f"{_in_words(gpu)}, and Triton is not installed"


def kernel_origin(snapshot: Snapshot) -> str | None:
    return snapshot.kernels if snapshot.cuda else None


def not_hopper(snapshot: Snapshot) -> str | None:
    gpu = snapshot.gpu
    return None if gpu is None or gpu.is_hopper or gpu.capability < OLDEST or not snapshot.triton else _in_words(gpu)


def too_old(snapshot: Snapshot) -> str | None:
    return None if snapshot.gpu is None or snapshot.gpu.capability >= OLDEST else _in_words(snapshot.gpu)


def _in_words(gpu: Gpu) -> str:
    return f"{gpu.name} is an AMD GPU" if gpu.amd else f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}"


def backend_in_words(snapshot: Snapshot) -> str:
    """Which backend a call with `backend="auto"` gets here, and why."""
    if not snapshot.cuda:
        return "backend cpu: PyTorch finds no GPU"
    if snapshot.gpu is None:
        return "backend: CUDA is not initialised, so the GPU was not asked"
    if snapshot.gpu.capability < OLDEST:
        return f"backend cpu only: {_in_words(snapshot.gpu)}, and backend triton needs 8.0 or later"
    chosen = "hopper" if snapshot.gpu.is_hopper else "triton"
    return f"backend {chosen} for CUDA tensors: {_in_words(snapshot.gpu)} (hopper is for NVIDIA's 9.0, triton for the others from 8.0 on)"


SURROUNDING_CHECKS = (
    Check(
        "cublas-workspace",
        "error",
        "environment",
        cublas_workspace,
        "cuBLAS may pick workspaces, and with them the split of a sum, by which stream is free; PyTorch's deterministic mode then raises.",
        f"export {CUBLAS}={CUBLAS_ALLOWED[0]} (or {CUBLAS_ALLOWED[1]}) before the process starts",
        "NVIDIA cuBLAS documentation, Results Reproducibility",
    ),
    Check(
        "late-environment",
        "warning",
        "environment",
        late_environment,
        "These variables are read once, at initialisation. A value set later looks right in os.environ and has no effect.",
        "Set them in the shell or the launcher, so that the process starts with them",
        "PyTorch documentation, notes/cuda; NVIDIA NCCL documentation, Environment Variables",
    ),
    Check(
        "late-hash-seed",
        "warning",
        "environment",
        late_hash_seed,
        "Python reads it before the first line of a program; set from inside it reaches child processes only.",
        f"export {HASH_SEED}=0 before the process starts",
        "Python documentation, Command line and environment",
    ),
    Check(
        "nccl-algorithm",
        "warning",
        "environment",
        nccl,
        "NCCL chooses algorithm, protocol and in-switch sums by topology and message size: other nodes, another order of sums. "
        "Trainers differ in what they pin: Megatron-LM's deterministic mode NCCL_ALGO, vLLM's batch-invariant mode all three and more.",
        "export NCCL_ALGO=Ring NCCL_PROTO=Simple NCCL_NVLS_ENABLE=0 on every rank (slower than NCCL's own choice)",
        "NVIDIA NCCL documentation, Environment Variables",
    ),
    Check(
        "transformer-engine",
        "error",
        "environment",
        transformer_engine,
        "Transformer Engine then may use attention backward kernels that add dQ in order of arrival.",
        f"export {NVTE}=0 before the process starts",
        "NVIDIA Transformer Engine documentation, Environment variables",
    ),
    Check(
        "max-autotune-variable",
        "error",
        "environment",
        autotune_variable,
        AUTOTUNE,
        f"unset {MAX_AUTOTUNE}",
        "PyTorch documentation, torch.compile",
    ),
    Check(
        "torch-version",
        "error",
        "environment",
        torch_version,
        f"dash-attn is tested with PyTorch {LEAST_TORCH[0]}.{LEAST_TORCH[1]} and later; earlier ones lack some deterministic operators.",
        f"pip install 'torch>={LEAST_TORCH[0]}.{LEAST_TORCH[1]}'",
        "README.md; PyTorch release notes",
    ),
    Check(
        "cuda-bindings",
        "warning",
        "environment",
        cuda_bindings,
        "Backend hopper launches its kernels through it; without it dash-attn raises on CUDA tensors.",
        "pip install 'dash-attn[gpu]'",
        "README.md",
    ),
    Check(
        "kernel-origin",
        "info",
        "environment",
        kernel_origin,
        "Machine code decides bits. Packed kernels are the same on every machine; those compiled here depend on the NVRTC at hand.",
        "Install the same wheel everywhere (python -m build), and compare the kernels' hashes (dash_attn.explain)",
        "docs/hopper.md",
    ),
    Check(
        "gpu-model",
        "info",
        "environment",
        not_hopper,
        "Backend hopper runs on compute capability 9.0 only, so calls get backend triton: as reproducible, but its bits are its own.",
        "Nothing, if all GPUs of a run get the same backend; backend='triton' chooses it on a Hopper GPU, too",
        "docs/triton.md",
    ),
    Check(
        "gpu-too-old",
        "error",
        "environment",
        too_old,
        "Backend triton needs compute capability 8.0 or later; on this GPU dash-attn raises, it does not fall back.",
        "Use an A100, an RTX 30 or a later GPU, or CPU tensors",
        "docs/triton.md",
    ),
    Check(
        "triton-missing",
        "warning",
        "environment",
        no_triton,
        "Backend triton, which this GPU needs, is compiled by it; without it dash-attn raises on CUDA tensors.",
        "pip install 'triton>=3.4' (PyTorch's CUDA builds for Linux bring it)",
        "docs/triton.md",
    ),
    Check(
        "hash-seed",
        "info",
        "environment",
        hash_seed,
        "The order of sets of strings then changes from process to process: harmless for tensors, not for data lists built from sets.",
        f"export {HASH_SEED}=0 before the process starts",
        "Python documentation, Command line and environment",
    ),
)
