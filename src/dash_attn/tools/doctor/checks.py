"""The checks: how each one looks at a process, and what it says about what it finds."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from ...backends.gpus import OLDEST
from ...libraries import LEAST, numbers
from ..machine import Gpu, Snapshot

Severity = Literal["error", "warning", "info"]
Scope = Literal["flag", "environment"]  # a flag is set inside the training script; the rest is there before it starts
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_ALLOWED = (":4096:8", ":16:8")
NCCL = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE")
NVTE = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
MAX_AUTOTUNE = "TORCHINDUCTOR_MAX_AUTOTUNE"
HASH_SEED = "PYTHONHASHSEED"
READ_ONCE = (CUBLAS, NVTE, "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE", MAX_AUTOTUNE)


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


def _other_gpu(process: Snapshot) -> str | None:
    """One that backend triton serves, in words."""
    gpu = process.gpu
    return None if gpu is None or gpu.is_hopper or gpu.capability < OLDEST else _in_words(gpu)


def _in_words(gpu: Gpu) -> str:
    return f"{gpu.name} is an AMD GPU" if gpu.amd else f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}"


def backend_of(process: Snapshot) -> str:
    """Which backend a call with `backend="auto"` gets on the GPU, and `cpu` where none serves it."""
    if process.gpu is None or process.gpu.capability < OLDEST:
        return "cpu"
    return "hopper" if process.gpu.is_hopper else "triton"


def backend_in_words(process: Snapshot) -> str:
    """The same, and why."""
    if not process.cuda:
        return "backend cpu: PyTorch finds no GPU"
    if process.gpu is None:
        return "backend: CUDA is not initialised, so the GPU was not asked"
    if process.gpu.capability < OLDEST:
        return f"backend cpu only: {_in_words(process.gpu)}, and backend triton needs 8.0 or later"
    why = f"{_in_words(process.gpu)} (hopper is for NVIDIA's 9.0, triton for the others from 8.0 on)"
    return f"backend {backend_of(process)} for CUDA tensors: {why}"


# What each check says, as it is printed, with braces for what was seen.
TEXTS = """
error  deterministic-algorithms: torch.use_deterministic_algorithms is off
    why: Operations that have an unordered and an ordered version run the unordered one, and those without an ordered one run silently.
    fix: torch.use_deterministic_algorithms(True)
    see: PyTorch documentation, torch.use_deterministic_algorithms
warning  warn-only: torch.use_deterministic_algorithms(True, warn_only=True)
    why: An operation without a deterministic version warns once and goes on with other bits in every run.
    fix: torch.use_deterministic_algorithms(True), without warn_only
    see: PyTorch documentation, torch.use_deterministic_algorithms
error  cudnn-benchmark: torch.backends.cudnn.benchmark is True
    why: cuDNN times its algorithms in every process and takes the fastest; another run may time another winner, which rounds differently.
    fix: torch.backends.cudnn.benchmark = False
    see: PyTorch documentation, notes/randomness (Reproducibility)
warning  cudnn-deterministic: torch.backends.cudnn.deterministic is False
    why: Convolutions and recurrent layers may use cuDNN algorithms that add with atomics.
    fix: torch.use_deterministic_algorithms(True) or torch.backends.cudnn.deterministic = True
    see: PyTorch documentation, notes/randomness (Reproducibility)
error  max-autotune: torch._inductor.config.max_autotune is True
    why: torch.compile picks kernels by measured time, so two processes may run kernels with different tiles and different sums.
    fix: Leave torch._inductor.config.max_autotune False, and use no mode='max-autotune'
    see: PyTorch documentation, torch.compile
warning  sdpa-backends: scaled_dot_product_attention may use {}
    why: The cuDNN and memory-efficient backward passes add dQ in order of arrival unless deterministic algorithms are asked for strictly.
    fix: torch.use_deterministic_algorithms(True), or torch.backends.cuda.enable_cudnn_sdp(False) and enable_mem_efficient_sdp(False)
    see: PyTorch documentation, torch.nn.functional.scaled_dot_product_attention
warning  other-attention: imported: {}
    why: The backward passes of these libraries add dQ in order of arrival by default; a layer that still calls them is not reproducible.
    fix: Call dash_attn.flash_attn_func instead, or pass deterministic=True where the library has it
    see: DASH, arXiv 2601.21824, section 1; FlashAttention README (deterministic)
info  tf32: TF32 is allowed in {}
    why: Not random by itself, but fp32 products then round to 10 mantissa bits on GPUs and library versions that have TF32 only.
    fix: torch.backends.cuda.matmul.allow_tf32 = False; torch.backends.cudnn.allow_tf32 = False
    see: PyTorch documentation, notes/cuda (CUDA semantics)
info  reduced-precision-sums: reduced-precision sums are allowed for {}
    why: Not random by itself, but sums of 16-bit products then depend on how cuBLAS splits them, which changes with shape and GPU.
    fix: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False, and the same for fp16
    see: PyTorch documentation, notes/cuda (CUDA semantics)
info  uninitialized-memory: torch.utils.deterministic.fill_uninitialized_memory is False
    why: A kernel that reads memory nobody wrote then gives whatever was there before, instead of NaN in every run.
    fix: torch.utils.deterministic.fill_uninitialized_memory = True (costs a fill for every new tensor)
    see: PyTorch documentation, torch.utils.deterministic
error  cublas-workspace: CUBLAS_WORKSPACE_CONFIG{}
    why: cuBLAS may pick workspaces, and with them the split of a sum, by which stream is free; PyTorch's deterministic mode then raises.
    fix: export CUBLAS_WORKSPACE_CONFIG=:4096:8 (or :16:8) before the process starts
    see: NVIDIA cuBLAS documentation, Results Reproducibility
warning  late-environment: changed since the process started, and CUDA or torch.distributed is already initialised: {}
    why: These variables are read once, at initialisation. A value set later looks right in os.environ and has no effect.
    fix: Set them in the shell or the launcher, so that the process starts with them
    see: PyTorch documentation, notes/cuda; NVIDIA NCCL documentation, Environment Variables
warning  late-hash-seed: PYTHONHASHSEED is {}
    why: Python reads it before the first line of a program; set from inside it reaches child processes only.
    fix: export PYTHONHASHSEED=0 before the process starts
    see: Python documentation, Command line and environment
warning  nccl-algorithm: {}
    why: NCCL chooses algorithm, protocol and in-switch sums by topology and message size: other nodes, another order of sums.
         Trainers differ in what they pin: Megatron-LM's deterministic mode NCCL_ALGO, vLLM's batch-invariant mode all three and more.
    fix: export NCCL_ALGO=Ring NCCL_PROTO=Simple NCCL_NVLS_ENABLE=0 on every rank (slower than NCCL's own choice)
    see: NVIDIA NCCL documentation, Environment Variables
error  transformer-engine: transformer_engine is imported and NVTE_ALLOW_NONDETERMINISTIC_ALGO is {}
    why: Transformer Engine then may use attention backward kernels that add dQ in order of arrival.
    fix: export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 before the process starts
    see: NVIDIA Transformer Engine documentation, Environment variables
error  max-autotune-variable: TORCHINDUCTOR_MAX_AUTOTUNE={}
    why: torch.compile picks kernels by measured time, so two processes may run kernels with different tiles and different sums.
    fix: unset TORCHINDUCTOR_MAX_AUTOTUNE
    see: PyTorch documentation, torch.compile
error  torch-version: PyTorch {}
    why: dash-attn is tested with PyTorch 2.9 and later; earlier ones lack some deterministic operators.
    fix: pip install 'torch>=2.9'
    see: README.md; PyTorch release notes
warning  cuda-bindings: CUDA is there, cuda-bindings is not
    why: Backend hopper launches its kernels through it; without it dash-attn raises on CUDA tensors.
    fix: pip install 'dash-attn[gpu]'
    see: README.md
info  kernel-origin: {}
    why: Machine code decides bits. Shipped kernels are the same on every machine; those compiled here depend on the NVRTC at hand.
    fix: Install the same wheel everywhere (python -m build), and compare the kernels' hashes (dash_attn.explain)
    see: docs/hopper.md
info  gpu-model: {}
    why: Backend hopper runs on compute capability 9.0 only, so calls get backend triton: as reproducible, but its bits are its own.
    fix: Nothing, if all GPUs of a run get the same backend; backend='triton' chooses it on a Hopper GPU, too
    see: docs/triton.md
error  gpu-too-old: {}
    why: Backend triton needs compute capability 8.0 or later; on this GPU dash-attn raises, it does not fall back.
    fix: Use an A100, an RTX 30 or a later GPU, or CPU tensors
    see: docs/triton.md
warning  triton-missing: {}, and Triton is not installed
    why: Backend triton, which this GPU needs, is compiled by it; without it dash-attn raises on CUDA tensors.
    fix: pip install 'triton>=3.4' (PyTorch's CUDA builds for Linux bring it)
    see: docs/triton.md
info  hash-seed: PYTHONHASHSEED is {}
    why: The order of sets of strings then changes from process to process: harmless for tensors, not for data lists built from sets.
    fix: export PYTHONHASHSEED=0 before the process starts
    see: Python documentation, Command line and environment
"""
Look = Callable[[Snapshot], bool | str | Sequence[str] | None]  # whether something is wrong with a process, or what
FLAGS: dict[str, Look] = {  # by id
    "deterministic-algorithms": lambda p: not p.deterministic,
    "warn-only": lambda p: p.deterministic and p.warn_only,
    "cudnn-benchmark": lambda p: p.cuda and p.cudnn_benchmark,
    # PyTorch takes either switch for cuDNN, so one is enough.
    "cudnn-deterministic": lambda p: p.cuda and not p.cudnn_deterministic and not p.deterministic,
    "max-autotune": lambda p: p.max_autotune,
    # In strict deterministic mode PyTorch itself leaves out cuDNN and orders the memory-efficient backward.
    "sdpa-backends": lambda p: p.cuda and (not p.deterministic or p.warn_only) and p.sdpa,
    # Transformer Engine has a switch, and with it a check of its own.
    "other-attention": lambda p: [name for name in ("flash_attn", "flash_attn_interface", "xformers") if name in p.modules],
    "tf32": lambda p: p.cuda and p.environment.get("NVIDIA_TF32_OVERRIDE") != "0" and p.tf32,
    "reduced-precision-sums": lambda p: p.cuda and p.reduced_precision,
    "uninitialized-memory": lambda p: p.deterministic and not p.fill_uninitialized,
}
ENVIRONMENT: dict[str, Look] = {
    "cublas-workspace": _cublas_workspace,
    "late-environment": lambda p: (p.cuda_initialized or p.world_size > 1) and _changed_since_start(p),  # else nobody has read them yet
    "late-hash-seed": _late_hash_seed,
    "nccl-algorithm": _nccl,
    "transformer-engine": lambda p: "transformer_engine" in p.modules and p.environment.get(NVTE) != "0" and _value(p, NVTE),
    "max-autotune-variable": lambda p: p.environment.get(MAX_AUTOTUNE, "0") != "0" and p.environment[MAX_AUTOTUNE],
    "torch-version": lambda p: numbers(p.torch_version) < numbers(LEAST["torch"]) and p.torch_version,
    "cuda-bindings": lambda p: p.cuda and not p.cuda_bindings and (p.gpu is None or p.gpu.is_hopper),
    "kernel-origin": lambda p: p.cuda and p.kernels,
    "gpu-model": lambda p: p.triton and _other_gpu(p),
    "gpu-too-old": lambda p: p.gpu is not None and p.gpu.capability < OLDEST and _in_words(p.gpu),
    "triton-missing": lambda p: not p.triton and _other_gpu(p),
    "hash-seed": lambda p: p.environment.get(HASH_SEED, "") in ("", "random") and _value(p, HASH_SEED),
}


def _checks() -> Iterator[tuple[str, Finding]]:
    for found in re.finditer(r"^(\w+)  ([\w-]+): (.*)\n    why: ((?s:.*?))\n    fix: (.*)\n    see: (.*)$", TEXTS, re.MULTILINE):
        severity, id, *texts = (" ".join(text.split()) for text in found.groups())
        yield id, Finding(id, cast(Severity, severity), "flag" if id in FLAGS else "environment", *texts)


CHECKS = dict(_checks())  # by id


def look(check: Finding, process: Snapshot) -> Finding | None:
    """The check with what it sees, if anything is wrong."""
    seen = {**FLAGS, **ENVIRONMENT}[check.id](process)
    return replace(check, found=check.found.format(seen if isinstance(seen, (str, bool)) else ", ".join(seen))) if seen else None
