"""What this backend can do, and on which GPUs. Everything else raises: nothing falls back."""

from functools import cache
from importlib.util import find_spec

import torch

from ...call.call import Call
from ...call.options import in_words
from ...errors import Unsupported
from ...libraries import LEAST, check_library
from ...masks import IntervalMask, PatternPerHead, TileMap, TilePattern
from ..gpus import OLDEST

LARGEST_DIM = 256
LONGEST = 2**29  # of a sequence: positions are told apart with 32 bits
MOST_PROGRAMS = 2**31  # of a launch
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NO_DEVICE = "8.0"  # whose tiles `explain` tells where tensors are on no GPU


@cache
def architecture_of(device: torch.device) -> str:
    """The compute capability of a GPU, as 8.6, or an AMD GPU's name, as gfx942. Raises where the kernels cannot run."""
    if device.type != "cuda":
        return NO_DEVICE
    check_triton()
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).partition(":")[0]
    if (properties.major, properties.minor) < OLDEST:
        raise Unsupported(
            f"backend 'triton' needs a GPU of compute capability {OLDEST[0]}.{OLDEST[1]} or later (A100, RTX 30 and later);"
            f" {properties.name} has {properties.major}.{properties.minor}. CPU tensors run on any machine (backend 'cpu')"
        )
    return f"{properties.major}.{properties.minor}"


def check_triton() -> None:
    if find_spec("triton") is None:
        raise Unsupported(
            "backend 'triton' needs Triton, which is not installed. PyTorch's CUDA and ROCm builds for Linux bring it;"
            f" elsewhere: pip install 'triton>={LEAST['triton']}'"
        )
    triton_version()  # imports it
    check_library("triton", "backend 'triton'")


def triton_version() -> str:
    import triton

    return str(triton.__version__)


def check_call(call: Call) -> None:
    (q, _, v), options = call.tensors, call.options
    if q.dtype not in DTYPES:
        raise Unsupported(f"backend 'triton' takes bfloat16, float16 and float32; got {q.dtype}")
    if max(q.shape[-1], v.shape[-1]) > LARGEST_DIM:
        raise Unsupported(f"backend 'triton' takes head dims up to {LARGEST_DIM}; got q/k {q.shape[-1]}, v {v.shape[-1]}")
    if options.scale < 0:
        raise Unsupported(f"backend 'triton' takes softmax_scale > 0; got {options.scale}")
    if max(q.shape[-3], v.shape[-3]) >= LONGEST:
        raise Unsupported(f"backend 'triton' takes fewer than 2^29 queries and keys; got {q.shape[-3]} and {v.shape[-3]}")
    if not options.ordered:
        raise Unsupported(
            "backend 'triton' has no unordered sums: each is one program's alone, so accumulation must be 'ordered'; got 'unordered'"
        )
    if options.schedule != "auto":
        raise Unsupported(
            f"backend 'triton' sums dQ in a pass of its own, in one fixed order: schedule must be 'auto'; got {in_words(options.schedule)}"
        )
    if options.dropout_p:
        raise Unsupported(
            f"backend 'triton' has no dropout yet: dropout_p must be 0; got {options.dropout_p}. Backends 'cpu' and 'hopper' have it"
        )
    if options.alibi:
        raise Unsupported("backend 'triton' has no ALiBi yet: alibi_slopes must be None. Backends 'cpu' and 'hopper' have it")
    if call.offsets is not None and options.mask.sides is None:
        raise Unsupported(
            f"packed sequences on backend 'triton' take a full or causal mask, or a window; got {options.mask}."
            " A sequence at a time, by flash_attn_func, takes any mask."
        )
    if not isinstance(options.mask, (IntervalMask, TileMap, TilePattern, PatternPerHead)):
        raise Unsupported(f"backend 'triton' has no element mask for {type(options.mask).__name__}")


def check_elements(call: Call) -> None:
    """A pattern alone does not say what attends."""
    mask = call.options.mask
    patterns = mask.patterns if isinstance(mask, PatternPerHead) else (mask,)
    if any(isinstance(pattern, TilePattern) for pattern in patterns) and call.elements is None:
        raise Unsupported(f"backend 'triton' needs the elements of a boolean mask: give flash_attn_func the mask itself; got {mask}")


def check_programs(count: int) -> None:
    if count >= MOST_PROGRAMS:
        raise Unsupported(f"backend 'triton' takes fewer than 2^31 tiles (batch x heads x tiles of a sequence); got {count}")
