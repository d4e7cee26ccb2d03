"""Checks of switches that a training script sets inside its own process."""

from __future__ import annotations

from .check import AUTOTUNE, Check
from .snapshot import Snapshot

RANDOMNESS = "PyTorch documentation, notes/randomness (Reproducibility)"
DETERMINISTIC = "PyTorch documentation, torch.use_deterministic_algorithms"
CUDA_NOTES = "PyTorch documentation, notes/cuda (CUDA semantics)"


def algorithms_off(snapshot: Snapshot) -> str | None:
    return None if snapshot.deterministic else "torch.use_deterministic_algorithms is off"


def warn_only(snapshot: Snapshot) -> str | None:
    return "torch.use_deterministic_algorithms(True, warn_only=True)" if snapshot.deterministic and snapshot.warn_only else None


def cudnn_benchmark(snapshot: Snapshot) -> str | None:
    return "torch.backends.cudnn.benchmark is True" if snapshot.cuda and snapshot.cudnn_benchmark else None


def cudnn_deterministic(snapshot: Snapshot) -> str | None:
    """PyTorch takes either switch for cuDNN, so one is enough."""
    off = snapshot.cuda and not snapshot.cudnn_deterministic and not snapshot.deterministic
    return "torch.backends.cudnn.deterministic is False" if off else None


def max_autotune(snapshot: Snapshot) -> str | None:
    return "torch._inductor.config.max_autotune is True" if snapshot.max_autotune else None


def sdpa_backends(snapshot: Snapshot) -> str | None:
    """In strict deterministic mode PyTorch itself leaves out cuDNN and orders the memory-efficient backward."""
    strict = snapshot.deterministic and not snapshot.warn_only
    if not snapshot.cuda or not snapshot.sdpa or strict:
        return None
    return f"scaled_dot_product_attention may use {', '.join(snapshot.sdpa)}"


def other_attention(snapshot: Snapshot) -> str | None:
    """Transformer Engine has a switch, and with it a check of its own."""
    found = [name for name in ("flash_attn", "flash_attn_interface", "xformers") if name in snapshot.modules]
    return f"imported: {', '.join(found)}" if found else None


def tf32(snapshot: Snapshot) -> str | None:
    overridden = snapshot.environment.get("NVIDIA_TF32_OVERRIDE") == "0"
    return f"TF32 is allowed in {', '.join(snapshot.tf32)}" if snapshot.cuda and snapshot.tf32 and not overridden else None


def reduced_precision(snapshot: Snapshot) -> str | None:
    found = snapshot.cuda and snapshot.reduced_precision
    return f"reduced-precision sums are allowed for {', '.join(snapshot.reduced_precision)}" if found else None


def uninitialized_memory(snapshot: Snapshot) -> str | None:
    off = snapshot.deterministic and not snapshot.fill_uninitialized
    return "torch.utils.deterministic.fill_uninitialized_memory is False" if off else None


FLAG_CHECKS = (
    Check(
        "deterministic-algorithms",
        "error",
        "flag",
        algorithms_off,
        "Operations that have an unordered and an ordered version run the unordered one, and those with only the first run silently.",
        "torch.use_deterministic_algorithms(True)",
        DETERMINISTIC,
    ),
    Check(
        "warn-only",
        "warning",
        "flag",
        warn_only,
        "An operation without a deterministic version warns once and goes on with other bits in every run.",
        "torch.use_deterministic_algorithms(True), without warn_only",
        DETERMINISTIC,
    ),
    Check(
        "cudnn-benchmark",
        "error",
        "flag",
        cudnn_benchmark,
        "cuDNN times its algorithms in every process and takes the fastest; another run may time another winner, which rounds differently.",
        "torch.backends.cudnn.benchmark = False",
        RANDOMNESS,
    ),
    Check(
        "cudnn-deterministic",
        "warning",
        "flag",
        cudnn_deterministic,
        "Convolutions and recurrent layers may use cuDNN algorithms that add with atomics.",
        "torch.use_deterministic_algorithms(True) or torch.backends.cudnn.deterministic = True",
        RANDOMNESS,
    ),
    Check(
        "max-autotune",
        "error",
        "flag",
        max_autotune,
        AUTOTUNE,
        "Leave torch._inductor.config.max_autotune False, and use no mode='max-autotune'",
        "PyTorch documentation, torch.compile",
    ),
    Check(
        "sdpa-backends",
        "warning",
        "flag",
        sdpa_backends,
        "The cuDNN and memory-efficient backward passes add dQ in order of arrival unless deterministic algorithms are asked for strictly.",
        "torch.use_deterministic_algorithms(True), or torch.backends.cuda.enable_cudnn_sdp(False) and enable_mem_efficient_sdp(False)",
        "PyTorch documentation, torch.nn.functional.scaled_dot_product_attention",
    ),
    Check(
        "other-attention",
        "warning",
        "flag",
        other_attention,
        "The backward passes of these libraries add dQ in order of arrival by default; a layer that still calls them is not reproducible.",
        "Call dash_attn.flash_attn_func instead, or pass deterministic=True where the library has it",
        "DASH, arXiv 2601.21824, section 1; FlashAttention README (deterministic)",
    ),
    Check(
        "tf32",
        "info",
        "flag",
        tf32,
        "Not random by itself, but fp32 products then round to 10 mantissa bits on GPUs and library versions that have TF32 only.",
        "torch.backends.cuda.matmul.allow_tf32 = False; torch.backends.cudnn.allow_tf32 = False",
        CUDA_NOTES,
    ),
    Check(
        "reduced-precision-sums",
        "info",
        "flag",
        reduced_precision,
        "Not random by itself, but sums of 16-bit products then depend on how cuBLAS splits them, which changes with shape and GPU.",
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False, and the same for fp16",
        CUDA_NOTES,
    ),
    Check(
        "uninitialized-memory",
        "info",
        "flag",
        uninitialized_memory,
        "A kernel that reads memory nobody wrote then gives whatever was there before, instead of NaN in every run.",
        "torch.utils.deterministic.fill_uninitialized_memory = True (costs a fill for every new tensor)",
        "PyTorch documentation, torch.utils.deterministic",
    ),
)
