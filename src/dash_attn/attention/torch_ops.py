"""Attention as torch operators, for torch.compile: dash_attn::attention and its backward; attention_of_matrix for boolean tensors.

Every choice of a call is an argument of the operator. Calls that are not traced take the lighter way through
autograd.Attention; both ways run the same two functions. Of tensor subclasses, fake tensors get shapes, and those that
have no rule for the operator (DTensor) raise.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import SymFloat, SymInt, Tensor

from ..backends import resolve
from ..call.boolean_masks import check_mask_tensor, refuse_learnt, take_mask
from ..call.call import Call, Grads, Modifiers, Saved, with_elements
from ..call.offsets import SequenceOffsets
from ..call.options import AttentionOptions, Choices, choose_mask, refuse_given_schedule, text_of
from ..call.tensor_checks import check_seeds, check_sinks, check_slopes, check_tensors
from ..masks import check_mask
from ..masks.encoding import decode_mask, encode_mask
from ..scheduling.schedule import Schedule
from .autograd import attention_backward, attention_forward
from .known import KnownCall, known_for
from .operators import define_operator

TENSORS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? dropout_seed, Tensor? alibi_slopes, Tensor? mask_tensor"
MORE_TENSORS = TENSORS.count("Tensor?")
CHOICES = (
    f"{TENSORS}, SymInt max_seqlen_q, SymInt max_seqlen_k, str mask, SymInt[] mask_sizes, float? scale, float softcap,"
    " str schedule, str accumulation, str backend, SymInt head_offset, float dropout_p, int version"
)
# Part of every traced program, so that one from a cache or a file whose operators meant something else is refused, not run.
# 2: the LSE has a gradient. 3: dropout and ALiBi. 4: mask tensors.
VERSION = 4
BY_TENSOR = "tensor"  # in place of a mask's name: a boolean matrix is a tensor argument of its own
FORWARD = f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {CHOICES}) -> (Tensor, Tensor)"
BACKWARD = (
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor? sinks, {CHOICES})"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


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
    version: int

    @property
    def modifiers(self) -> Modifiers | None:
        if self.dropout_seed is None and self.alibi_slopes is None:
            return None
        return Modifiers(self.dropout_seed, self.alibi_slopes)


def traced_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    packed: tuple[Tensor, Tensor, int, int] | None,
    choices: Choices,
    modifiers: Modifiers | None = None,
) -> tuple[Tensor, Tensor]:
    """The operator. packed: SequenceOffsets' fields."""
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = packed or (None, None, 0, 0)
    chosen = choose_mask(choices.mask, choices.causal, choices.window_size)
    matrix = chosen if isinstance(chosen, Tensor) else None
    if matrix is not None:
        refuse_learnt(matrix)
    name, sizes = (BY_TENSOR, []) if matrix is not None else encode_mask(chosen)
    arguments = Arguments(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        dropout_seed=None if modifiers is None else modifiers.seeds,
        alibi_slopes=None if modifiers is None else modifiers.slopes,
        mask_tensor=matrix,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        mask=name,
        mask_sizes=sizes,
        scale=choices.softmax_scale,
        softcap=choices.softcap,
        schedule=schedule_text(choices.schedule),
        accumulation=choices.accumulation,
        backend=choices.backend,
        head_offset=choices.head_offset,
        dropout_p=choices.dropout_p,
        version=VERSION,
    )
    out, lse = _operator(matrix)(q, k, v, sinks, *arguments)
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
    arguments = Arguments(*rest)
    offsets, options = _read(q, k, v, sinks, arguments)
    assert options is not None, "a program that runs has no symbols"
    modifiers = arguments.modifiers
    if arguments.mask_tensor is not None:  # what it keeps is known when a program runs: in every run it is planned anew
        mask, elements = take_mask(arguments.mask_tensor, q, k)
        options, modifiers = replace(options, mask=mask), with_elements(modifiers, elements)
    if known is not None:
        known.options = options
    return Call(q, k, v, options, offsets, sinks, modifiers), known


def _shapes(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    _read(q, k, v, sinks, Arguments(*rest))
    return empty_results(q, v.shape[-1])


def _shapes_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty_gradients(q, k, v, sinks)


def _read(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, arguments: Arguments
) -> tuple[SequenceOffsets | None, AttentionOptions | None]:
    """The arguments, checked. While a program is traced a number may be a symbol; then options are read when it runs."""
    check_version(arguments.version, VERSION, "operators")
    check_tensors(q, k, v, ndim=4 if arguments.cu_seqlens_q is None else 3)
    check_sinks(sinks, q)
    _check_matrix(q, k, arguments)
    offsets = offsets_of(arguments)
    if offsets is not None:
        offsets.check_device(q.device)
    scale = q.shape[-1] ** -0.5 if arguments.scale is None else arguments.scale
    _check_modifiers(q, arguments)
    if has_symbols(*arguments.mask_sizes, scale, arguments.softcap, arguments.head_offset, arguments.dropout_p):
        return offsets, None
    options = _options(
        "full" if arguments.mask == BY_TENSOR else arguments.mask,  # what a tensor keeps is not known before the program runs
        tuple(arguments.mask_sizes),
        scale,
        arguments.softcap,
        arguments.schedule,
        arguments.accumulation,
        arguments.backend,
        arguments.head_offset,
        arguments.dropout_p,
        arguments.alibi_slopes is not None,
    )
    resolve(options.backend, q.device)
    if offsets is None:
        options.mask.check(q.shape[1], k.shape[1])
    else:
        refuse_given_schedule(options)
    return offsets, options


def _check_matrix(q: Tensor, k: Tensor, arguments: Arguments) -> None:
    matrix = arguments.mask_tensor
    if (arguments.mask == BY_TENSOR) != (matrix is not None):
        raise ValueError(f"mask {BY_TENSOR!r} and mask_tensor come together; got mask {arguments.mask[:80]!r}")
    if matrix is None:
        return
    if arguments.cu_seqlens_q is not None:
        check_mask(matrix)  # a matrix is for sequences of one length
    check_mask_tensor(matrix, q, k)


def _check_modifiers(q: Tensor, arguments: Arguments) -> None:
    sequences = q.shape[0] if arguments.cu_seqlens_q is None else len(arguments.cu_seqlens_q) - 1
    check_seeds(arguments.dropout_seed, q, sequences)
    check_slopes(arguments.alibi_slopes, q, sequences)
    if arguments.dropout_p and arguments.dropout_seed is None:
        raise ValueError(f"dropout needs a seed for each sequence; got dropout_p={arguments.dropout_p} and no dropout_seed")


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


def offsets_of(arguments: Any) -> SequenceOffsets | None:
    """Of Arguments or CacheArguments."""
    if arguments.cu_seqlens_q is None or arguments.cu_seqlens_k is None:
        return None
    longest = (0 if isinstance(length, SymInt) else length for length in (arguments.max_seqlen_q, arguments.max_seqlen_k))
    return SequenceOffsets(arguments.cu_seqlens_q, arguments.cu_seqlens_k, *longest)


@lru_cache(maxsize=1024, typed=True)
def _options(mask: str, mask_sizes: tuple[int, ...], *others: Any) -> AttentionOptions:
    return AttentionOptions(decode_mask(mask, mask_sizes), *others)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.choices = inputs[: 4 + MORE_TENSORS], inputs[4 + MORE_TENSORS :]
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    unused = (None,) * (MORE_TENSORS + len(ctx.choices))
    out, lse, q, k, v, sinks, *others = ctx.saved_tensors
    if dout is None:
        if dlse is None:
            return (None,) * 4 + unused
        dout = torch.zeros_like(out)  # only the LSE was used
    run = _operator(others[MORE_TENSORS - 1], backward=True)
    dq, dk, dv, dsinks = run(dout, dlse, out, lse, q, k, v, sinks, *others, *ctx.choices)
    return dq, dk, dv, None if sinks is None else dsinks, *unused


for name, tags in (("attention", ()), ("attention_of_matrix", (torch.Tag.cudagraph_unsafe,))):
    define_operator(name + FORWARD, _run, _shapes, (_differentiate, _keep_for_backward), tags)
    define_operator(f"{name}_backward{BACKWARD}", _run_backward, _shapes_backward, tags=tags)
