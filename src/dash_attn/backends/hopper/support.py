"""What the Hopper kernels can do. Everything else raises: nothing falls back."""

from functools import cache

import torch
from torch import Tensor

from ...call.options import AttentionOptions, in_words
from ...call.planning import DEFAULT_WORKERS
from ...errors import Unsupported
from ...masks import IntervalMask, Mask, PatternPerHead, TilePattern
from ..gpus import is_hopper
from .driver.launch import ANY_DEVICE
from .tiles import KERNEL_DIMS

LARGEST_DIM = KERNEL_DIMS[-1]
MOST_KINDS = 2  # of head in a schedule: Pair in driver/parameters.py
MOST_ROWS = 2**31  # LSE is indexed with 32 bits
DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}


@cache
def sm_count(index: int) -> int:
    """Number of SMs, if the device is a Hopper GPU; of an H200 where no device is meant."""
    if index == ANY_DEVICE:
        return DEFAULT_WORKERS
    properties = torch.cuda.get_device_properties(index)
    if not is_hopper(index):
        raise Unsupported(
            "backend 'hopper' needs an NVIDIA GPU of compute capability 9.0 (H100, H200, GH200);"
            f" {properties.name} has {properties.major}.{properties.minor}. Other GPUs run backend 'triton', which 'auto' chooses there."
        )
    return int(properties.multi_processor_count)


def check_call(q: Tensor, v: Tensor, options: AttentionOptions, packed: bool = False) -> None:
    if q.dtype not in DTYPES:
        raise Unsupported(f"backend 'hopper' takes bfloat16 and float16; got {q.dtype}")
    if max(q.shape[-1], v.shape[-1]) > LARGEST_DIM:
        raise Unsupported(f"backend 'hopper' takes head dims up to {LARGEST_DIM}; got q/k {q.shape[-1]}, v {v.shape[-1]}")
    if options.scale < 0:
        raise Unsupported(f"backend 'hopper' takes softmax_scale > 0; got {options.scale}")
    if q.numel() // q.shape[-1] >= MOST_ROWS:
        raise Unsupported(f"backend 'hopper' takes fewer than 2^31 query rows (batch x length x heads); got {q.numel() // q.shape[-1]}")
    if not options.ordered and (options.softcap or is_modified(options)):
        asked = "softcap" if options.softcap else modifiers_in_words(options)
        raise Unsupported(
            f"accumulation='unordered' is for comparison only: backend 'hopper' has it without softcap, dropout and ALiBi; got {asked}"
        )
    if options.softcap and options.dropout_p and options.alibi:
        raise Unsupported(
            f"backend 'hopper' has softcap with dropout or with ALiBi, not with both; got softcap={options.softcap},"
            f" {modifiers_in_words(options)}. Backend 'cpu' has them together"
        )
    if isinstance(options.mask, (TilePattern, PatternPerHead)):
        refuse_modifiers(options, "boolean masks that have partial blocks or differ between heads (backend 'cpu' has them together)")
    if packed:
        _check_packed(options)


def is_modified(options: AttentionOptions) -> bool:
    """Whether kernels of their own run it."""
    return bool(options.dropout_p) or options.alibi


def modifiers_in_words(options: AttentionOptions) -> str:
    asked = [f"dropout_p={options.dropout_p}"] if options.dropout_p else []
    return " and ".join(asked + ["alibi_slopes"] if options.alibi else asked)


def refuse_modifiers(options: AttentionOptions, what: str) -> None:
    """For kernels that have neither."""
    if is_modified(options):
        raise Unsupported(
            f"backend 'hopper' has no dropout and no ALiBi for {what}: dropout_p must be 0 and alibi_slopes None;"
            f" got {modifiers_in_words(options)}"
        )


def _check_packed(options: AttentionOptions) -> None:
    """Lengths are known on the device only, so the kernels must be able to plan from them."""
    if not is_plain_band(options.mask):
        raise Unsupported(
            f"packed sequences on backend 'hopper' take a full or causal mask, or a window with a right limit; got {options.mask}."
            " A sequence at a time, by flash_attn_func, takes any mask."
        )
    if options.schedule != "auto":
        raise Unsupported(
            f"packed sequences on backend 'hopper' are planned on the device: schedule must be 'auto'; got {in_words(options.schedule)}"
        )


def check_shared_mask(mask: Mask) -> None:
    """Raise where the kernels cannot mask some rows of a sequence."""
    if not isinstance(mask, IntervalMask):
        raise NotImplementedError(
            f"backend 'hopper' shares sequences between ranks with masks that keep one interval of keys per query; got {mask}, which"
            " one rank, and backend 'cpu' on any number of them, can do"
        )


def check_kinds(kinds: int) -> None:
    """The kernels' tables have room for two."""
    if kinds > MOST_KINDS:
        raise Unsupported(f"backend 'hopper' takes schedules of at most {MOST_KINDS} kinds of head; got one of {kinds}")


def check_gang(gang: int, workers: int) -> None:
    """Chains that wait for each other in a circle must all be resident."""
    if gang > workers:
        raise Unsupported(
            f"packed sequences of this length on a full mask need {gang} SMs at once;"
            f" this GPU (or the slice of it given to us) has {workers}."
            " Causal masks run on any number of SMs, and so does flash_attn_func with schedule='alternating', one sequence at a time;"
            " its bits are not those of packed sequences on a full mask, so use it on every machine of a run"
        )


def is_plain_band(mask: Mask) -> bool:
    """Full, causal, or a window that does not look ahead without limit."""
    return mask.sides is not None and (mask.sides[1] >= 0 or mask.sides[0] < 0)
