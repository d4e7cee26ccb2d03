"""The checks: how each one looks at a process, and what it says about what it finds."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ...backends.gpus import OLDEST
from ..machine import Gpu, Snapshot

Severity = Literal["error", "warning", "info"]
Scope = Literal["flag", "environment"]  # a flag is set inside the training script; the rest is there before it starts
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
RANDOMNESS = "PyTorch documentation, notes/randomness (Reproducibility)"
DETERMINISTIC = "PyTorch documentation, torch.use_deterministic_algorithms"
CUDA_NOTES = "PyTorch documentation, notes/cuda (CUDA semantics)"
AUTOTUNE = "torch.compile picks kernels by measured time, so two processes may run kernels with different tiles and different sums."
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_ALLOWED = (":4096:8", ":16:8")
NCCL = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE")
NVTE = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
MAX_AUTOTUNE = "TORCHINDUCTOR_MAX_AUTOTUNE"
HASH_SEED = "PYTHONHASHSEED"
READ_ONCE = (CUBLAS, NVTE, "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE", MAX_AUTOTUNE)
LEAST_TORCH = (2, 9)


@dataclass(frozen=True)
class Finding:
    """Something that breaks reproducibility (error), may break it (warning), or is good to know (info)."""

    id: str
    severity: Severity
    scope: Scope
    found: str
    why: str
    fix: str
    reference: str


@dataclass(frozen=True)
class Check:
    """`look` says what is wrong with a process, None if nothing is."""

    scope: Scope
    id: str
    severity: Severity
    look: Callable[[Snapshot], str | None]
    why: str
    fix: str
    reference: str

    def finding(self, process: Snapshot) -> Finding | None:
        found = self.look(process)
        return None if found is None else Finding(self.id, self.severity, self.scope, found, self.why, self.fix, self.reference)


def cudnn_deterministic(process: Snapshot) -> str | None:
    """PyTorch takes either switch for cuDNN, so one is enough."""
    off = process.cuda and not process.cudnn_deterministic and not process.deterministic
    return "torch.backends.cudnn.deterministic is False" if off else None


def sdpa_backends(process: Snapshot) -> str | None:
    """In strict deterministic mode PyTorch itself leaves out cuDNN and orders the memory-efficient backward."""
    strict = process.deterministic and not process.warn_only
    if not process.cuda or not process.sdpa or strict:
        return None
    return f"scaled_dot_product_attention may use {', '.join(process.sdpa)}"


def other_attention(process: Snapshot) -> str | None:
    """Transformer Engine has a switch, and with it a check of its own."""
    found = [name for name in ("flash_attn", "flash_attn_interface", "xformers") if name in process.modules]
    return f"imported: {', '.join(found)}" if found else None


def tf32(process: Snapshot) -> str | None:
    overridden = process.environment.get("NVIDIA_TF32_OVERRIDE") == "0"
    return f"TF32 is allowed in {', '.join(process.tf32)}" if process.cuda and process.tf32 and not overridden else None


def reduced_precision(process: Snapshot) -> str | None:
    found = process.cuda and process.reduced_precision
    return f"reduced-precision sums are allowed for {', '.join(process.reduced_precision)}" if found else None


def uninitialized_memory(process: Snapshot) -> str | None:
    off = process.deterministic and not process.fill_uninitialized
    return "torch.utils.deterministic.fill_uninitialized_memory is False" if off else None


def cublas_workspace(process: Snapshot) -> str | None:
    value = process.environment.get(CUBLAS)
    if not process.cuda or value in CUBLAS_ALLOWED:
        return None
    return f"{CUBLAS} is not set" if value is None else f"{CUBLAS}={value}"


def changed_since_start(process: Snapshot) -> list[str]:
    """Variables that libraries read once and that are not what the process was started with."""
    if process.started_with is None:
        return []
    now, then = process.environment, process.started_with
    return sorted(name for name in {*now, *then} if (name in READ_ONCE or name.startswith("NCCL_")) and now.get(name) != then.get(name))


def late_environment(process: Snapshot) -> str | None:
    changed = changed_since_start(process)
    if not changed or not (process.cuda_initialized or process.world_size > 1):
        return None  # nobody has read them yet
    return f"changed since the process started, and CUDA or torch.distributed is already initialised: {', '.join(changed)}"


def late_hash_seed(process: Snapshot) -> str | None:
    if process.started_with is None:
        return None
    now, then = process.environment.get(HASH_SEED), process.started_with.get(HASH_SEED)
    return None if now == then else f"{HASH_SEED} is {now or 'unset'} now, but Python was started with {then or 'none'}"


def hash_seed(process: Snapshot) -> str | None:
    value = process.environment.get(HASH_SEED, "")
    return f"{HASH_SEED} is {value or 'not set'}" if value in ("", "random") else None


def nccl(process: Snapshot) -> str | None:
    missing = [name for name in NCCL if name not in process.environment]
    return f"{process.world_size} ranks, not set: {', '.join(missing)}" if process.world_size > 1 and missing else None


def transformer_engine(process: Snapshot) -> str | None:
    value = process.environment.get(NVTE)
    if "transformer_engine" not in process.modules or value == "0":
        return None
    return f"transformer_engine is imported and {NVTE} is {'not set' if value is None else value}"


def autotune_variable(process: Snapshot) -> str | None:
    value = process.environment.get(MAX_AUTOTUNE, "")
    return f"{MAX_AUTOTUNE}={value}" if value not in ("", "0") else None


def torch_version(process: Snapshot) -> str | None:
    found = re.match(r"(\d+)\.(\d+)", process.torch_version)
    old = found is not None and (int(found[1]), int(found[2])) < LEAST_TORCH
    return f"PyTorch {process.torch_version}" if old else None


def cuda_bindings(process: Snapshot) -> str | None:
    other_gpu = process.gpu is not None and not process.gpu.is_hopper
    return "CUDA is there, cuda-bindings is not" if process.cuda and not process.cuda_bindings and not other_gpu else None


def no_triton(process: Snapshot) -> str | None:
    gpu = process.gpu
    if gpu is None or process.triton or gpu.is_hopper or gpu.capability < OLDEST:
        return None
    return f"{_in_words(gpu)}, and Triton is not installed"


def not_hopper(process: Snapshot) -> str | None:
    gpu = process.gpu
    return None if gpu is None or gpu.is_hopper or gpu.capability < OLDEST or not process.triton else _in_words(gpu)


def _in_words(gpu: Gpu) -> str:
    return f"{gpu.name} is an AMD GPU" if gpu.amd else f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}"


def backend_in_words(process: Snapshot) -> str:
    """Which backend a call with `backend="auto"` gets here, and why."""
    if not process.cuda:
        return "backend cpu: PyTorch finds no GPU"
    if process.gpu is None:
        return "backend: CUDA is not initialised, so the GPU was not asked"
    if process.gpu.capability < OLDEST:
        return f"backend cpu only: {_in_words(process.gpu)}, and backend triton needs 8.0 or later"
    chosen = "hopper" if process.gpu.is_hopper else "triton"
    return f"backend {chosen} for CUDA tensors: {_in_words(process.gpu)} (hopper is for NVIDIA's 9.0, triton for the others from 8.0 on)"


_flag, _environment = partial(Check, "flag"), partial(Check, "environment")
CHECKS: tuple[Check, ...] = (
    _flag(
        "deterministic-algorithms",
        "error",
        lambda process: None if process.deterministic else "torch.use_deterministic_algorithms is off",
        "Operations that have an unordered and an ordered version run the unordered one, and those with only the first run silently.",
        "torch.use_deterministic_algorithms(True)",
        DETERMINISTIC,
    ),
    _flag(
        "warn-only",
        "warning",
        lambda process: "torch.use_deterministic_algorithms(True, warn_only=True)" if process.deterministic and process.warn_only else None,
        "An operation without a deterministic version warns once and goes on with other bits in every run.",
        "torch.use_deterministic_algorithms(True), without warn_only",
        DETERMINISTIC,
    ),
    _flag(
        "cudnn-benchmark",
        "error",
        lambda process: "torch.backends.cudnn.benchmark is True" if process.cuda and process.cudnn_benchmark else None,
        "cuDNN times its algorithms in every process and takes the fastest; another run may time another winner, which rounds differently.",
        "torch.backends.cudnn.benchmark = False",
        RANDOMNESS,
    ),
    _flag(
        "cudnn-deterministic",
        "warning",
        cudnn_deterministic,
        "Convolutions and recurrent layers may use cuDNN algorithms that add with atomics.",
        "torch.use_deterministic_algorithms(True) or torch.backends.cudnn.deterministic = True",
        RANDOMNESS,
    ),
    _flag(
        "max-autotune",
        "error",
        lambda process: "torch._inductor.config.max_autotune is True" if process.max_autotune else None,
        AUTOTUNE,
        "Leave torch._inductor.config.max_autotune False, and use no mode='max-autotune'",
        "PyTorch documentation, torch.compile",
    ),
    _flag(
        "sdpa-backends",
        "warning",
        sdpa_backends,
        "The cuDNN and memory-efficient backward passes add dQ in order of arrival unless deterministic algorithms are asked for strictly.",
        "torch.use_deterministic_algorithms(True), or torch.backends.cuda.enable_cudnn_sdp(False) and enable_mem_efficient_sdp(False)",
        "PyTorch documentation, torch.nn.functional.scaled_dot_product_attention",
    ),
    _flag(
        "other-attention",
        "warning",
        other_attention,
        "The backward passes of these libraries add dQ in order of arrival by default; a layer that still calls them is not reproducible.",
        "Call dash_attn.flash_attn_func instead, or pass deterministic=True where the library has it",
        "DASH, arXiv 2601.21824, section 1; FlashAttention README (deterministic)",
    ),
    _flag(
        "tf32",
        "info",
        tf32,
        "Not random by itself, but fp32 products then round to 10 mantissa bits on GPUs and library versions that have TF32 only.",
        "torch.backends.cuda.matmul.allow_tf32 = False; torch.backends.cudnn.allow_tf32 = False",
        CUDA_NOTES,
    ),
    _flag(
        "reduced-precision-sums",
        "info",
        reduced_precision,
        "Not random by itself, but sums of 16-bit products then depend on how cuBLAS splits them, which changes with shape and GPU.",
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False, and the same for fp16",
        CUDA_NOTES,
    ),
    _flag(
        "uninitialized-memory",
        "info",
        uninitialized_memory,
        "A kernel that reads memory nobody wrote then gives whatever was there before, instead of NaN in every run.",
        "torch.utils.deterministic.fill_uninitialized_memory = True (costs a fill for every new tensor)",
        "PyTorch documentation, torch.utils.deterministic",
    ),
    _environment(
        "cublas-workspace",
        "error",
        cublas_workspace,
        "cuBLAS may pick workspaces, and with them the split of a sum, by which stream is free; PyTorch's deterministic mode then raises.",
        f"export {CUBLAS}={CUBLAS_ALLOWED[0]} (or {CUBLAS_ALLOWED[1]}) before the process starts",
        "NVIDIA cuBLAS documentation, Results Reproducibility",
    ),
    _environment(
        "late-environment",
        "warning",
        late_environment,
        "These variables are read once, at initialisation. A value set later looks right in os.environ and has no effect.",
        "Set them in the shell or the launcher, so that the process starts with them",
        "PyTorch documentation, notes/cuda; NVIDIA NCCL documentation, Environment Variables",
    ),
    _environment(
        "late-hash-seed",
        "warning",
        late_hash_seed,
        "Python reads it before the first line of a program; set from inside it reaches child processes only.",
        f"export {HASH_SEED}=0 before the process starts",
        "Python documentation, Command line and environment",
    ),
    _environment(
        "nccl-algorithm",
        "warning",
        nccl,
        "NCCL chooses algorithm, protocol and in-switch sums by topology and message size: other nodes, another order of sums. "
        "Trainers differ in what they pin: Megatron-LM's deterministic mode NCCL_ALGO, vLLM's batch-invariant mode all three and more.",
        "export NCCL_ALGO=Ring NCCL_PROTO=Simple NCCL_NVLS_ENABLE=0 on every rank (slower than NCCL's own choice)",
        "NVIDIA NCCL documentation, Environment Variables",
    ),
    _environment(
        "transformer-engine",
        "error",
        transformer_engine,
        "Transformer Engine then may use attention backward kernels that add dQ in order of arrival.",
        f"export {NVTE}=0 before the process starts",
        "NVIDIA Transformer Engine documentation, Environment variables",
    ),
    _environment(
        "max-autotune-variable",
        "error",
        autotune_variable,
        AUTOTUNE,
        f"unset {MAX_AUTOTUNE}",
        "PyTorch documentation, torch.compile",
    ),
    _environment(
        "torch-version",
        "error",
        torch_version,
        f"dash-attn is tested with PyTorch {LEAST_TORCH[0]}.{LEAST_TORCH[1]} and later; earlier ones lack some deterministic operators.",
        f"pip install 'torch>={LEAST_TORCH[0]}.{LEAST_TORCH[1]}'",
        "README.md; PyTorch release notes",
    ),
    _environment(
        "cuda-bindings",
        "warning",
        cuda_bindings,
        "Backend hopper launches its kernels through it; without it dash-attn raises on CUDA tensors.",
        "pip install 'dash-attn[gpu]'",
        "README.md",
    ),
    _environment(
        "kernel-origin",
        "info",
        lambda process: process.kernels if process.cuda else None,
        "Machine code decides bits. Packed kernels are the same on every machine; those compiled here depend on the NVRTC at hand.",
        "Install the same wheel everywhere (python -m build), and compare the kernels' hashes (dash_attn.explain)",
        "docs/hopper.md",
    ),
    _environment(
        "gpu-model",
        "info",
        not_hopper,
        "Backend hopper runs on compute capability 9.0 only, so calls get backend triton: as reproducible, but its bits are its own.",
        "Nothing, if all GPUs of a run get the same backend; backend='triton' chooses it on a Hopper GPU, too",
        "docs/triton.md",
    ),
    _environment(
        "gpu-too-old",
        "error",
        lambda process: None if process.gpu is None or process.gpu.capability >= OLDEST else _in_words(process.gpu),
        "Backend triton needs compute capability 8.0 or later; on this GPU dash-attn raises, it does not fall back.",
        "Use an A100, an RTX 30 or a later GPU, or CPU tensors",
        "docs/triton.md",
    ),
    _environment(
        "triton-missing",
        "warning",
        no_triton,
        "Backend triton, which this GPU needs, is compiled by it; without it dash-attn raises on CUDA tensors.",
        "pip install 'triton>=3.4' (PyTorch's CUDA builds for Linux bring it)",
        "docs/triton.md",
    ),
    _environment(
        "hash-seed",
        "info",
        hash_seed,
        "The order of sets of strings then changes from process to process: harmless for tensors, not for data lists built from sets.",
        f"export {HASH_SEED}=0 before the process starts",
        "Python documentation, Command line and environment",
    ),
)
