"""The choices of one attention call in one frozen value; forward and backward are pure functions of tensors and this."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

from ..errors import did_you_mean
from ..masks import Causal, Documents, Full, Mask, Window, check_mask, is_whole
from ..masks.rules import mask_in_words
from ..scheduling.generators import SCHEDULES
from ..scheduling.json_fields import shortened
from ..scheduling.schedule import Schedule
from .dropout import LEVELS, threshold_of
from .tensor_checks import check_flags

LOG2_E = 1.4426950408889634
Accumulation = Literal["ordered", "unordered"]
BackendName = Literal["auto", "cpu", "hopper", "triton"]
ACCUMULATIONS: tuple[str, ...] = get_args(Accumulation)
BACKENDS: tuple[str, ...] = get_args(BackendName)


@dataclass(frozen=True)
class AttentionOptions:
    """`softcap=0` means none. `schedule` is a name or the JSON text of a schedule. `head_offset` is the index of the first KV head in
    the unsharded model. `dropout_p` and `alibi` (whether there are slopes) come with tensors of their own (`Modifiers`).
    """

    mask: Mask
    scale: float
    softcap: float = 0.0
    schedule: str = "auto"
    accumulation: str = "ordered"
    backend: str = "auto"
    head_offset: int = 0
    dropout_p: float = 0.0
    alibi: bool = False

    def __post_init__(self) -> None:
        check_mask(self.mask)
        if not is_finite(self.scale) or self.scale == 0:
            raise ValueError(f"softmax_scale must be a finite number other than 0; got {shortened(self.scale)}")
        if not is_finite(self.softcap) or self.softcap < 0:
            raise ValueError(f"softcap must be a finite number > 0, or 0 for none; got {shortened(self.softcap)}")
        _check_schedule(self.schedule)
        for name, allowed in (("accumulation", ACCUMULATIONS), ("backend", BACKENDS)):
            if not isinstance(getattr(self, name), str) or getattr(self, name) not in allowed:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; choose from {', '.join(allowed)}")
        if not is_whole(self.head_offset) or not 0 <= self.head_offset < 2**31:
            raise ValueError(f"head_offset must be a whole number >= 0 and below 2^31; got {shortened(self.head_offset)}")
        check_dropout(self.dropout_p)
        if self.dropout_p and isinstance(self.mask, Documents):
            raise ValueError(
                f"dropout needs a seed for each document: lay them end to end and give flash_attn_varlen_func one dropout_seed per"
                f" document; got dropout_p={self.dropout_p!r} with a mask of {len(self.mask.lengths)} documents"
            )
        for name in ("scale", "softcap", "dropout_p"):
            object.__setattr__(self, name, float(getattr(self, name)))

    @cached_property
    def _hash(self) -> int:
        of_scores = self.mask, self.scale, self.softcap, self.dropout_p, self.alibi
        return hash((of_scores, self.schedule, self.accumulation, self.backend, self.head_offset))

    def __hash__(self) -> int:
        """Kept: every call looks itself up by its options."""
        return self._hash

    @property
    def ordered(self) -> bool:
        return self.accumulation == "ordered"

    @property
    def kernel_scales(self) -> dict[str, float]:
        """What kernels multiply scores by: before exp2 and, with softcap, before tanh, which they make of exp2, too."""
        cap = self.softcap
        return {"scale_log2": (cap or self.scale) * LOG2_E, "cap_scale": 2 * LOG2_E * self.scale / cap if cap else 0.0}

    @cached_property
    def gives_schedule(self) -> bool:
        """Whether the schedule is the caller's own, not one that we name."""
        return self.schedule not in SCHEDULES


class Choices(NamedTuple):
    """The choices of a call as they were given, FlashAttention's and ours. `options_for` checks them."""

    mask: Any = None  # a Mask, or a boolean mask, of which take_mask makes one
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softmax_scale: float | None = None  # None: by the head dim
    softcap: float = 0.0
    schedule: str | Schedule = "auto"
    accumulation: str = "ordered"
    backend: str = "auto"
    head_offset: int = 0
    dropout_p: float = 0.0
    alibi: bool = False


def is_zero(value: Any) -> bool:
    """Only a number can be 0: an array is compared element by element."""
    return isinstance(value, Real) and value == 0


def is_finite(value: Any) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def check_dropout(dropout_p: Any) -> None:
    """A probability that some of the numbers drop, not none and not all."""
    if not is_zero(dropout_p) and not (is_finite(dropout_p) and 0 < dropout_p < 1 and 0 < threshold_of(dropout_p) < LEVELS):
        raise ValueError(f"dropout_p must be 0, or from 1/{LEVELS} to 1 - 1/{LEVELS}; got {shortened(dropout_p)}")


def check_options(choices: Choices, *, deterministic: bool, **flags: bool) -> None:
    """What needs no tensor to be refused. `deterministic` is FlashAttention's, and says nothing here: unless it contradicts ours."""
    check_flags(**flags, deterministic=deterministic)
    if isinstance(choices.accumulation, str) and choices.accumulation == "unordered" and deterministic:
        raise ValueError("deterministic=True contradicts accumulation='unordered'; choose one")
    check_dropout(choices.dropout_p)


def refuse_given_schedule(options: AttentionOptions) -> None:
    """For packed sequences: one schedule is for sequences of one length."""
    if options.gives_schedule:
        raise ValueError(
            "packed sequences are planned one by one, each by its own lengths (on a GPU by the device), so a Schedule cannot serve"
            f" them: schedule must be 'auto', or a name on the CPU; got the schedule {in_words(options.schedule)}."
            " flash_attn_func takes one, for sequences of one length"
        )


def choose_mask(mask: Mask | None, causal: bool, window_size: tuple[int, int]) -> Mask:
    """One mask from FlashAttention's two arguments or ours. A causal window ends at the query itself."""
    check_flags(causal=causal)
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2 or not all(is_whole(w) and w >= -1 for w in window_size):
        raise ValueError(f"window_size must be (left, right), each a whole number >= 0 or -1 for no limit; got {window_size!r}")
    window = Window(window_size[0], 0 if causal else window_size[1])
    if mask is not None:
        if causal or not window.is_full:
            given = f"mask={mask_in_words(mask)}, causal={causal}, window_size={window_size}"
            raise ValueError(f"give either mask or causal/window_size; got {given}")
        return mask
    if window.is_full:
        return Full()
    return Causal() if window.is_causal else window


def options_for(choices: Choices, head_dim: int) -> AttentionOptions:
    """The options of a call, checked. Training repeats the same few, so they are kept."""
    mask, causal, window_size, scale, softcap, schedule, accumulation, backend, head_offset, dropout_p, alibi = choices
    if scale is None:
        scale = head_dim**-0.5
    if not isinstance(schedule, str):
        schedule = text_of(schedule)
    others = scale, softcap, schedule, accumulation, backend, head_offset, dropout_p, alibi
    if isinstance(window_size, (tuple, list)) and len(window_size) == 2:
        try:
            return _kept(mask, causal, window_size[0], window_size[1], *others)
        except TypeError:  # something has no hash, or is of a wrong type: below it is said what
            pass
    return AttentionOptions(choose_mask(mask, causal, window_size), *others)


@lru_cache(maxsize=1024, typed=True)  # typed: 1, 1.0 and True are equal, but not all of them are allowed everywhere
def _kept(mask: Mask | None, causal: bool, left: int, right: int, *others: Any) -> AttentionOptions:
    return AttentionOptions(choose_mask(mask, causal, (left, right)), *others)


def _check_schedule(schedule: Any) -> None:
    if isinstance(schedule, str) and schedule in SCHEDULES:
        return
    if isinstance(schedule, str) and is_given(schedule):
        read_given(schedule)
    else:
        allowed = ", ".join(SCHEDULES)
        raise ValueError(
            f"unknown schedule {schedule!r}; choose from {allowed}, or give a Schedule or its JSON text{did_you_mean(schedule, SCHEDULES)}"
        )


# A schedule that a caller gives instead of a name. Options hold its JSON text: a value, which hashes once, and which a traced program can
# hold.


def text_of(schedule: str | Schedule) -> str:
    """A name or a JSON text as it is; of a Schedule its JSON text, which the schedule keeps."""
    return schedule.to_json() if isinstance(schedule, Schedule) else schedule


def is_given(schedule: str) -> bool:
    """Whether this is the JSON text of a schedule, not a name."""
    return schedule.lstrip().startswith("{")


@lru_cache(maxsize=64)
def read_given(text: str) -> Schedule:
    """Raises ValueError for whatever is wrong with it."""
    return Schedule.from_json(text)


def in_words(schedule: str | Schedule) -> str:
    """For a line of text: a JSON text is long."""
    given = schedule if isinstance(schedule, Schedule) else read_given(schedule) if is_given(schedule) else None
    return str(schedule) if given is None else f"{given.name} (given)"
