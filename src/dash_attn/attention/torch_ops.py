"""Attention as torch operators, for torch.compile: dash_attn::attention and its backward; attention_of_matrix for boolean tensors.

Every choice of a call is an argument of the operator. Calls that are not traced take the lighter way through
autograd.Attention; both ways run the same two functions. Of tensor subclasses, fake tensors get shapes, and those that
have no rule for the operator (DTensor) raise.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import SymFloat, SymInt, Tensor

from ..backends import resolve
from ..call.boolean_masks import check_mask_tensor, refuse_learnt
from ..call.call import Call, Given, Grads, Saved, options_of, sequences_in, with_elements
from ..call.offsets import Packed, SequenceOffsets
from ..call.options import Choices, choose_mask, text_of
from ..masks import Full
from ..masks.encoding import decode_mask, encode_mask
from ..scheduling.schedule import Schedule
from .autograd import attention_backward, attention_forward
from .known import KnownCall, known_for
from .operators import Version, define_operator, formula, in_schema

CHOSEN = ("softcap", "schedule", "accumulation", "backend", "head_offset", "dropout_p")  # of Choices, by the same names
# Part of every traced program, so that one from a cache or a file whose operators meant something else is refused, not run.
# 2: the LSE has a gradient. 3: dropout and ALiBi. 4: mask tensors.
VERSION = Version(4)
BY_TENSOR = "tensor"  # in place of a mask's name: a boolean matrix is a tensor argument of its own


class Arguments(NamedTuple):
    """What the operators take beside tensors that have a gradient, in the order of their schema: every choice of a call."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    dropout_seed: Tensor | None
    alibi_slopes: Tensor | None
    mask_tensor: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    mask: str
    mask_sizes: Sequence[int]
    scale: float | None  # None: by the head dim
    softcap: float
    schedule: str
    accumulation: str
    backend: str
    head_offset: int
    dropout_p: float
    version: Version


CHOICES = in_schema(Arguments)
MORE_TENSORS = CHOICES.count("Tensor?")
FORWARD = f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {CHOICES}) -> (Tensor, Tensor)"
BACKWARD = (
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor? sinks, {CHOICES})"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


def traced_attention(q: Tensor, k: Tensor, v: Tensor, given: Given, packed: Packed | None, choices: Choices) -> tuple[Tensor, Tensor]:
    """The operator."""
    chosen = choose_mask(choices.mask, choices.causal, choices.window_size)
    matrix = chosen if isinstance(chosen, Tensor) else None
    if matrix is not None:
        refuse_learnt(matrix)
    name, sizes = (BY_TENSOR, []) if matrix is not None else encode_mask(chosen)
    *ends, longest_q, longest_k = packed or (None, None, 0, 0)
    choices = choices._replace(schedule=schedule_text(choices.schedule))
    others = [getattr(choices, name) for name in CHOSEN]
    arguments = *ends, *given[1:], matrix, longest_q, longest_k, name, sizes, choices.softmax_scale, *others, VERSION
    out, lse = _operator(matrix)(q, k, v, given.sinks, *arguments)
    return out, lse


def _operator(matrix: Tensor | None, backward: bool = False) -> Any:
    """The host reads a matrix and plans by it, which a CUDA graph cannot hold. Such calls have operators of their own, that say so."""
    if matrix is None:
        return torch.ops.dash_attn.attention_backward if backward else torch.ops.dash_attn.attention
    return torch.ops.dash_attn.attention_of_matrix_backward if backward else torch.ops.dash_attn.attention_of_matrix


def schedule_text(schedule: str | Schedule) -> str:
    """The operators take text. A program that is compiled would keep that of the first Schedule object it sees."""
    if isinstance(schedule, Schedule) and torch.compiler.is_compiling():
        raise TypeError(
            "a compiled or exported program takes a schedule as JSON text: pass schedule.to_json(), made outside of the program"
        )
    return text_of(schedule)


def _run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    call, known = _call(q, k, v, sinks, rest)
    out, lse = attention_forward(call) if known is None else known.forward(call)
    return out, lse


def _run_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last result is empty where there are no sinks: an operator returns tensors only."""
    call, known = _call(q, k, v, sinks, rest)
    run = attention_backward if known is None else known.backward
    dq, dk, dv, dsinks = run(call, Saved(out, lse), Grads(dout, dlse))
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


def _call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, rest: tuple[Any, ...]) -> tuple[Call, KnownCall | None]:
    """And where it is known, unless other tensors come with it than those of packed sequences. rest: Arguments' fields."""
    cu_seqlens_q, cu_seqlens_k, *others, max_seqlen_q, max_seqlen_k, mask, mask_sizes = rest[: MORE_TENSORS + 4]
    known = None
    if sinks is None and others == [None, None, None]:
        packed = () if cu_seqlens_q is None else (cu_seqlens_q, cu_seqlens_k)
        choices = "operator", max_seqlen_q, max_seqlen_k, mask, tuple(mask_sizes), *rest[MORE_TENSORS + 4 :]
        known = known_for((q, k, v, *packed), *choices)
    if known is not None and known.options is not None:
        offsets = None if cu_seqlens_q is None else SequenceOffsets.known(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return Call(q, k, v, known.options, offsets), known
    call = _read(q, k, v, sinks, Arguments(*rest), runs=True)
    if known is not None:
        known.options = call.options
    return call, known


def _shapes(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    _read(q, k, v, sinks, Arguments(*rest), runs=False)
    return empty_results(q, v.shape[-1])


def _shapes_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty_gradients(*arguments[4:8])


def _read(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, arguments: Arguments, runs: bool) -> Call:
    """Checked. While a program is traced a number may be a symbol, and what a matrix keeps is not known; options are read when it runs."""
    check_version(arguments.version, VERSION, "operators")
    matrix, packed, given = arguments.mask_tensor, packed_of(arguments), Given(sinks, arguments.dropout_seed, arguments.alibi_slopes)
    if (arguments.mask == BY_TENSOR) != (matrix is not None):
        raise ValueError(f"mask {BY_TENSOR!r} and mask_tensor come together; got mask {arguments.mask[:80]!r}")
    numbers = arguments.scale, arguments.softcap, arguments.head_offset, arguments.dropout_p
    symbols = has_symbols(*q.shape[-1:], *arguments.mask_sizes, *numbers)
    choices = Choices(softmax_scale=1.0)
    if not symbols:
        mask = _decoded(arguments.mask, tuple(arguments.mask_sizes)) if matrix is None else matrix if runs or packed else Full()
        others = {name: getattr(arguments, name) for name in CHOSEN}
        choices = Choices(mask, softmax_scale=arguments.scale, alibi=given.alibi_slopes is not None, **others)
    options, offsets, elements = options_of(q, k, v, sinks, choices, packed)
    if matrix is not None and not runs:
        check_mask_tensor(matrix, q, k)
    given.check(q, sequences_in(q, packed))
    if arguments.dropout_p and given.dropout_seed is None:
        raise ValueError(f"dropout needs a seed for each sequence; got dropout_p={arguments.dropout_p} and no dropout_seed")
    if not symbols:
        resolve(options.backend, q.device)
    return Call(q, k, v, options, offsets, sinks, with_elements(given.modifiers, elements))


def check_version(found: int, here: int, what: str) -> None:
    if found != here:
        raise RuntimeError(
            f"this program was traced with version {found} of dash_attn's {what}, and here they have version {here}:"
            " compile or export it again"
        )


def has_symbols(*numbers: Any) -> bool:
    return any(isinstance(number, (SymInt, SymFloat)) for number in numbers)


def empty_results(q: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """Output and LSE."""
    *batch, length, heads, _ = q.shape
    lse = q.new_empty((*batch, heads, length), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return q.new_empty((*batch, length, heads, value_dim)), lse


def empty_gradients(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def packed_of(arguments: Any) -> Packed | None:
    """Of Arguments or CacheArguments."""
    if arguments.cu_seqlens_q is None or arguments.cu_seqlens_k is None:
        return None
    longest_q, longest_k = (0 if isinstance(length, SymInt) else length for length in (arguments.max_seqlen_q, arguments.max_seqlen_k))
    return arguments.cu_seqlens_q, arguments.cu_seqlens_k, longest_q, longest_k


_decoded = lru_cache(maxsize=1024, typed=True)(decode_mask)


FORMULA = formula(lambda matrix: _operator(matrix, backward=True), tensors=4 + MORE_TENSORS)
for name, tags in (("attention", ()), ("attention_of_matrix", (torch.Tag.cudagraph_unsafe,))):
    define_operator(name + FORWARD, _run, _shapes, FORMULA, tags)
    define_operator(f"{name}_backward{BACKWARD}", _run_backward, _shapes_backward, tags=tags)
