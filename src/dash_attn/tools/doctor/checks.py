"""The checks: how each one looks at a process, and what it says about what it finds."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
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
    """`look` says whether something is wrong with a process, or what; `found` says so, with what was seen in its braces."""

    scope: Scope
    severity: Severity
    look: Callable[[Snapshot], bool | str | Sequence[str] | None]
    found: str
    why: str
    fix: str
    reference: str

    def finding(self, id: str, process: Snapshot) -> Finding | None:
        seen = self.look(process)
        if not seen:
            return None
        told = self.found.format("" if seen is True else seen if isinstance(seen, str) else ", ".join(seen))
        return Finding(id, self.severity, self.scope, told, self.why, self.fix, self.reference)


def _value(process: Snapshot, variable: str) -> str:
    return process.environment.get(variable) or "not set"


def _cublas_workspace(process: Snapshot) -> str | None:
    value = process.environment.get(CUBLAS)
    if not process.cuda or value in CUBLAS_ALLOWED:
        return None
    return " is not set" if value is None else f"={value}"


def _changed_since_start(process: Snapshot) -> list[str]:
    """Variables that libraries read once and that are not what the process was started with."""
    if process.started_with is None:
        return []
    now, then = process.environment, process.started_with
    return sorted(name for name in {*now, *then} if (name in READ_ONCE or name.startswith("NCCL_")) and now.get(name) != then.get(name))


def _late_hash_seed(process: Snapshot) -> str | None:
    if process.started_with is None:
        return None
    now, then = process.environment.get(HASH_SEED), process.started_with.get(HASH_SEED)
    return None if now == then else f"{now or 'unset'} now, but Python was started with {then or 'none'}"


def _nccl(process: Snapshot) -> str | None:
    missing = [name for name in NCCL if name not in process.environment]
    return f"{process.world_size} ranks, not set: {', '.join(missing)}" if process.world_size > 1 and missing else None


def _old_torch(process: Snapshot) -> str | None:
    found = re.match(r"(\d+)\.(\d+)", process.torch_version)
    return process.torch_version if found is not None and (int(found[1]), int(found[2])) < LEAST_TORCH else None


def _other_gpu(process: Snapshot) -> str | None:
    """One that backend triton serves, in words."""
    gpu = process.gpu
    return None if gpu is None or gpu.is_hopper or gpu.capability < OLDEST else _in_words(gpu)


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
CHECKS: dict[str, Check] = {  # by id
    "deterministic-algorithms": _flag(
        "error",
        lambda p: not p.deterministic,
        "torch.use_deterministic_algorithms is off",
        "Operations that have an unordered and an ordered version run the unordered one, and those with only the first run silently.",
        "torch.use_deterministic_algorithms(True)",
        DETERMINISTIC,
    ),
    "warn-only": _flag(
        "warning",
        lambda p: p.deterministic and p.warn_only,
        "torch.use_deterministic_algorithms(True, warn_only=True)",
        "An operation without a deterministic version warns once and goes on with other bits in every run.",
        "torch.use_deterministic_algorithms(True), without warn_only",
        DETERMINISTIC,
    ),
    "cudnn-benchmark": _flag(
        "error",
        lambda p: p.cuda and p.cudnn_benchmark,
        "torch.backends.cudnn.benchmark is True",
        "cuDNN times its algorithms in every process and takes the fastest; another run may time another winner, which rounds differently.",
        "torch.backends.cudnn.benchmark = False",
        RANDOMNESS,
    ),
    "cudnn-deterministic": _flag(
        "warning",
        # PyTorch takes either switch for cuDNN, so one is enough.
        lambda p: p.cuda and not p.cudnn_deterministic and not p.deterministic,
        "torch.backends.cudnn.deterministic is False",
        "Convolutions and recurrent layers may use cuDNN algorithms that add with atomics.",
        "torch.use_deterministic_algorithms(True) or torch.backends.cudnn.deterministic = True",
        RANDOMNESS,
    ),
    "max-autotune": _flag(
        "error",
        lambda p: p.max_autotune,
        "torch._inductor.config.max_autotune is True",
        AUTOTUNE,
        "Leave torch._inductor.config.max_autotune False, and use no mode='max-autotune'",
        "PyTorch documentation, torch.compile",
    ),
    "sdpa-backends": _flag(
        "warning",
        # In strict deterministic mode PyTorch itself leaves out cuDNN and orders the memory-efficient backward.
        lambda p: p.cuda and (not p.deterministic or p.warn_only) and p.sdpa,
        "scaled_dot_product_attention may use {}",
        "The cuDNN and memory-efficient backward passes add dQ in order of arrival unless deterministic algorithms are asked for strictly.",
        "torch.use_deterministic_algorithms(True), or torch.backends.cuda.enable_cudnn_sdp(False) and enable_mem_efficient_sdp(False)",
        "PyTorch documentation, torch.nn.functional.scaled_dot_product_attention",
    ),
    "other-attention": _flag(
        "warning",
        # Transformer Engine has a switch, and with it a check of its own.
        lambda p: [name for name in ("flash_attn", "flash_attn_interface", "xformers") if name in p.modules],
        "imported: {}",
        "The backward passes of these libraries add dQ in order of arrival by default; a layer that still calls them is not reproducible.",
        "Call dash_attn.flash_attn_func instead, or pass deterministic=True where the library has it",
        "DASH, arXiv 2601.21824, section 1; FlashAttention README (deterministic)",
    ),
    "tf32": _flag(
        "info",
        lambda p: p.cuda and p.environment.get("NVIDIA_TF32_OVERRIDE") != "0" and p.tf32,
        "TF32 is allowed in {}",
        "Not random by itself, but fp32 products then round to 10 mantissa bits on GPUs and library versions that have TF32 only.",
        "torch.backends.cuda.matmul.allow_tf32 = False; torch.backends.cudnn.allow_tf32 = False",
        CUDA_NOTES,
    ),
    "reduced-precision-sums": _flag(
        "info",
        lambda p: p.cuda and p.reduced_precision,
        "reduced-precision sums are allowed for {}",
        "Not random by itself, but sums of 16-bit products then depend on how cuBLAS splits them, which changes with shape and GPU.",
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False, and the same for fp16",
        CUDA_NOTES,
    ),
    "uninitialized-memory": _flag(
        "info",
        lambda p: p.deterministic and not p.fill_uninitialized,
        "torch.utils.deterministic.fill_uninitialized_memory is False",
        "A kernel that reads memory nobody wrote then gives whatever was there before, instead of NaN in every run.",
        "torch.utils.deterministic.fill_uninitialized_memory = True (costs a fill for every new tensor)",
        "PyTorch documentation, torch.utils.deterministic",
    ),
    "cublas-workspace": _environment(
        "error",
        _cublas_workspace,
        "CUBLAS_WORKSPACE_CONFIG{}",
        "cuBLAS may pick workspaces, and with them the split of a sum, by which stream is free; PyTorch's deterministic mode then raises.",
        f"export {CUBLAS}={CUBLAS_ALLOWED[0]} (or {CUBLAS_ALLOWED[1]}) before the process starts",
        "NVIDIA cuBLAS documentation, Results Reproducibility",
    ),
    "late-environment": _environment(
        "warning",
        lambda p: (p.cuda_initialized or p.world_size > 1) and _changed_since_start(p),  # else nobody has read them yet
        "changed since the process started, and CUDA or torch.distributed is already initialised: {}",
        "These variables are read once, at initialisation. A value set later looks right in os.environ and has no effect.",
        "Set them in the shell or the launcher, so that the process starts with them",
        "PyTorch documentation, notes/cuda; NVIDIA NCCL documentation, Environment Variables",
    ),
    "late-hash-seed": _environment(
        "warning",
        _late_hash_seed,
        "PYTHONHASHSEED is {}",
        "Python reads it before the first line of a program; set from inside it reaches child processes only.",
        f"export {HASH_SEED}=0 before the process starts",
        "Python documentation, Command line and environment",
    ),
    "nccl-algorithm": _environment(
        "warning",
        _nccl,
        "{}",
        "NCCL chooses algorithm, protocol and in-switch sums by topology and message size: other nodes, another order of sums. "
        "Trainers differ in what they pin: Megatron-LM's deterministic mode NCCL_ALGO, vLLM's batch-invariant mode all three and more.",
        "export NCCL_ALGO=Ring NCCL_PROTO=Simple NCCL_NVLS_ENABLE=0 on every rank (slower than NCCL's own choice)",
        "NVIDIA NCCL documentation, Environment Variables",
    ),
    "transformer-engine": _environment(
        "error",
        lambda p: "transformer_engine" in p.modules and p.environment.get(NVTE) != "0" and _value(p, NVTE),
        "transformer_engine is imported and NVTE_ALLOW_NONDETERMINISTIC_ALGO is {}",
        "Transformer Engine then may use attention backward kernels that add dQ in order of arrival.",
        f"export {NVTE}=0 before the process starts",
        "NVIDIA Transformer Engine documentation, Environment variables",
    ),
    "max-autotune-variable": _environment(
        "error",
        lambda p: p.environment.get(MAX_AUTOTUNE, "0") != "0" and p.environment[MAX_AUTOTUNE],
        "TORCHINDUCTOR_MAX_AUTOTUNE={}",
        AUTOTUNE,
        f"unset {MAX_AUTOTUNE}",
        "PyTorch documentation, torch.compile",
    ),
    "torch-version": _environment(
        "error",
        _old_torch,
        "PyTorch {}",
        f"dash-attn is tested with PyTorch {LEAST_TORCH[0]}.{LEAST_TORCH[1]} and later; earlier ones lack some deterministic operators.",
        f"pip install 'torch>={LEAST_TORCH[0]}.{LEAST_TORCH[1]}'",
        "README.md; PyTorch release notes",
    ),
    "cuda-bindings": _environment(
        "warning",
        lambda p: p.cuda and not p.cuda_bindings and (p.gpu is None or p.gpu.is_hopper),
        "CUDA is there, cuda-bindings is not",
        "Backend hopper launches its kernels through it; without it dash-attn raises on CUDA tensors.",
        "pip install 'dash-attn[gpu]'",
        "README.md",
    ),
    "kernel-origin": _environment(
        "info",
        lambda p: p.cuda and p.kernels,
        "{}",
        "Machine code decides bits. Packed kernels are the same on every machine; those compiled here depend on the NVRTC at hand.",
        "Install the same wheel everywhere (python -m build), and compare the kernels' hashes (dash_attn.explain)",
        "docs/hopper.md",
    ),
    "gpu-model": _environment(
        "info",
        lambda p: p.triton and _other_gpu(p),
        "{}",
        "Backend hopper runs on compute capability 9.0 only, so calls get backend triton: as reproducible, but its bits are its own.",
        "Nothing, if all GPUs of a run get the same backend; backend='triton' chooses it on a Hopper GPU, too",
        "docs/triton.md",
    ),
    "gpu-too-old": _environment(
        "error",
        lambda p: p.gpu is not None and p.gpu.capability < OLDEST and _in_words(p.gpu),
        "{}",
        "Backend triton needs compute capability 8.0 or later; on this GPU dash-attn raises, it does not fall back.",
        "Use an A100, an RTX 30 or a later GPU, or CPU tensors",
        "docs/triton.md",
    ),
    "triton-missing": _environment(
        "warning",
        lambda p: not p.triton and _other_gpu(p),
        "{}, and Triton is not installed",
        "Backend triton, which this GPU needs, is compiled by it; without it dash-attn raises on CUDA tensors.",
        "pip install 'triton>=3.4' (PyTorch's CUDA builds for Linux bring it)",
        "docs/triton.md",
    ),
    "hash-seed": _environment(
        "info",
        lambda p: p.environment.get(HASH_SEED, "") in ("", "random") and _value(p, HASH_SEED),
        "PYTHONHASHSEED is {}",
        "The order of sets of strings then changes from process to process: harmless for tensors, not for data lists built from sets.",
        f"export {HASH_SEED}=0 before the process starts",
        "Python documentation, Command line and environment",
    ),
}
