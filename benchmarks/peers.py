"""Who is timed beside us: PyTorch's kernels under any mask, FlexAttention, FlashAttention packages; and our backward with equal heads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module, metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dash_attn.masks import Documents, IntervalMask, Mask, Prefix, Window
from dash_attn.tools.bench import pytorch_peers as of_pytorch
from dash_attn.tools.bench.candidates import CUDNN, EQUAL_HEADS, OURS, Candidate, Runner, Tensors, first_line, ours, packed, runner
from dash_attn.tools.bench.checks import dropped_keys
from dash_attn.tools.bench.pytorch_peers import FLASH, Attention, deterministic, lacks, plain_flash
from dash_attn.tools.bench.pytorch_peers import pytorch_peers as plain_peers
from dash_attn.tools.bench.shape import PASSES, Shape

CUDNN_MASKED, FLEX = f"{CUDNN} with a mask tensor", "FlexAttention"
# Modules with `flash_attn_func` and `flash_attn_varlen_func`, which take causal= and deterministic=.
PACKAGES = {
    "FlashAttention-4": "flash_attn.cute",
    "FlashAttention-3": "flash_attn_interface",
    "FlashAttention-2": "flash_attn",
}
SINKS = ("learnable_sink", "s_aux")  # what versions call it
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of batch, head, query and key indices


def peers(with_flex: bool = False) -> tuple[list[Candidate], dict[str, str]]:
    """Candidates, and why the others are missing."""
    packages, missing = package_peers()
    return [*pytorch_peers(), *([flex()] if with_flex else []), *packages], missing


def imported(makers: Mapping[str, Callable[[], Any]]) -> tuple[list[Any], dict[str, str]]:
    """What those make that can be imported, and why the others are missing."""
    found, missing = [], {}
    for name, make in makers.items():
        try:
            found.append(make())
        except Exception as error:  # a package built for another PyTorch fails in many ways
            missing[name] = first_line(error)
    return found, missing


def equal_heads(backend: str = "auto") -> Candidate:
    """Our backward of the same query heads, each with keys and values of its own: what sharing them is measured by."""
    plain = ours(False, backend)[0]

    def prepare(shape: Shape, tensors: Tensors) -> Runner:
        k, v = (x.repeat_interleave(shape.group, 2) for x in (tensors.k, tensors.v))
        made = plain.prepare(replace(shape, kv_heads=shape.q_heads), tensors._replace(k=k, v=v))

        def folded(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            dq, dk, dv, *rest = gradients
            sums = (x.float().unflatten(2, (shape.kv_heads, shape.group)).sum(3) for x in (dk, dv))
            return (dq, *sums, *rest)

        return replace(made, folded=folded)

    needless = f"its heads are equal already: see {OURS}"
    return Candidate(EQUAL_HEADS, prepare, True, ("backward",), refuses=lambda shape: None if shape.group > 1 else needless)


# ---- PyTorch


def pytorch_peers() -> list[Candidate]:
    """Those of `dash-attn bench`, with the masks that their kernels know below scaled_dot_product_attention; cuDNN also with a tensor."""
    needless = f"the mask needs no tensor: see {CUDNN}"
    return [
        plain_peers()[0],
        Candidate(CUDNN_MASKED, _cudnn_masked, refuses=lambda shape: lacks(shape) or (needless if shape.plain else None)),
        Candidate(FLASH, _flash, refuses=_refused_by_flash),
        Candidate(f"{FLASH} deterministic", deterministic(_flash), True, ("backward",), refuses=_refused_by_flash),
    ]


def lacks_mask(shape: Shape) -> str | None:
    """What FlashAttention's kernels do not know."""
    if not isinstance(shape.attended, IntervalMask):
        return "has no boolean matrices"
    return "has no prefix mask" if isinstance(shape.attended, Prefix) else None


def _refused_by_flash(shape: Shape) -> str | None:
    if shape.v_head_dim != shape.head_dim:
        return "takes only values as wide as keys"
    return lacks(shape) or lacks_mask(shape)


def _cudnn_masked(shape: Shape, tensors: Tensors) -> Runner:
    """The whole mask as a boolean tensor: the one way to tell scaled_dot_product_attention of any other mask."""
    dropped = dropped_keys(shape.attended, slice(0, shape.q_seqlen), shape.q_seqlen, shape.seqlen, tensors.q.device)
    return runner(of_pytorch.sdpa("CUDNN_ATTENTION", shape, attn_mask=~dropped), tensors, heads_first=True)


def _flash(shape: Shape, tensors: Tensors) -> Runner:
    if shape.sequences:
        return runner(packed(_varlen(shape), shape, tensors.q.device), tensors)
    if isinstance(shape.attended, Window):
        return runner(_operator(shape, window_size_left=shape.attended.left, window_size_right=shape.attended.right), tensors)
    if shape.causal and shape.shift:
        return runner(_operator(shape, is_causal=True), tensors)
    return plain_flash(shape, tensors)


def _operator(shape: Shape, is_causal: bool = False, **window: Any) -> Attention:
    """The operator below scaled_dot_product_attention: it has windows, and aligns the last query with the last key."""
    lengths = shape.q_seqlen, shape.seqlen
    operator = torch.ops.aten._flash_attention_forward
    return lambda q, k, v: operator(q, k, v, None, None, *lengths, 0.0, is_causal, False, **window)[0]


def _varlen(shape: Shape) -> Attention:
    """Packed sequences: PyTorch's function for them where it has one, else the operator below it."""
    causal = shape.sequences_causal
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        operator = torch.ops.aten._flash_attention_forward
        return lambda q, k, v, ends, longest: operator(q, k, v, ends, ends, longest, longest, 0.0, causal, False)[0]
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"is_causal": causal} if "is_causal" in known else {"window_size": (-1, 0 if causal else -1)}
    if "enable_gqa" in known:
        options["enable_gqa"] = shape.group > 1
    return lambda q, k, v, ends, longest: first(varlen_attn(q, k, v, ends, ends, longest, longest, **options))


# ---- FlashAttention packages, found by importing them. What a version can do is read off the arguments its functions take.


def package_peers() -> tuple[list[Candidate], dict[str, str]]:
    """Candidates, and why the others are missing."""
    found, missing = imported({name: partial(_package, name, module) for name, module in PACKAGES.items()})
    return [candidate for both in found for candidate in both], missing


def package_versions(candidates: Iterable[Candidate]) -> dict[str, str]:
    """Of those that are timed. What pip has not installed has no version."""
    timed = {candidate.name for candidate in candidates}
    known = metadata.packages_distributions()
    found = {name: known.get(module.partition(".")[0]) for name, module in PACKAGES.items() if name in timed}
    return {name: metadata.version(distributions[0]) if distributions else "unknown" for name, distributions in found.items()}


def _package(name: str, module: str) -> list[Candidate]:
    found = import_module(module)
    package = Package(found.flash_attn_func, getattr(found, "flash_attn_varlen_func", None))
    return [package.candidate(name, False), package.candidate(f"{name} deterministic", True)]


class Package(NamedTuple):
    """The two functions of a package: of rows, and of packed tokens."""

    of_rows: Callable[..., Any]
    of_tokens: Callable[..., Any] | None

    def candidate(self, name: str, deterministic: bool) -> Candidate:
        passes = ("backward",) if deterministic else PASSES
        return Candidate(name, partial(self.prepare, deterministic), deterministic, passes, refuses=self.refuses)

    def refuses(self, shape: Shape) -> str | None:
        function = self.function(shape)
        if function is None:
            return "has no function for packed sequences"
        if (lacking := lacks_mask(shape)) is not None:
            return lacking
        known = inspect.signature(function).parameters
        if isinstance(shape.attended, Window) and "window_size" not in known:
            return "has no windows"
        if shape.softcap and "softcap" not in known:
            return "has no softcap"
        return "has no sinks" if shape.sinks and not set(SINKS) & set(known) else None

    def function(self, shape: Shape) -> Callable[..., Any] | None:
        """Documents in a row are packed sequences to these packages."""
        return self.of_tokens if shape.sequences else self.of_rows

    def prepare(self, deterministic: bool, shape: Shape, tensors: Tensors) -> Runner:
        function = self.function(shape)
        assert function is not None  # else it had refused
        known = inspect.signature(function).parameters
        options: dict[str, Any] = {"deterministic": deterministic, "causal": shape.sequences_causal if shape.sequences else shape.causal}
        if isinstance(shape.attended, Window):
            options["window_size"] = window_of(shape, known["window_size"].default[0])  # -1 or None
        if shape.softcap:
            options["softcap"] = shape.softcap
        sink = next((name for name in SINKS if name in known), "")

        def of_rows(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
            return first(function(q, k, v, **options, **({sink: sinks[0]} if sinks else {})))

        def of_tokens(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int) -> Tensor:
            lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
            return first(function(q, k, v, **lengths, **options))

        return runner(packed(of_tokens, shape, tensors.q.device) if shape.sequences else of_rows, tensors)


def window_of(shape: Shape, unlimited: int | None = -1) -> tuple[int | None, ...]:
    """Keys before and after a query."""
    mask = shape.attended
    sides = (mask.left, mask.right) if isinstance(mask, Window) else (-1, -1)
    return tuple(unlimited if side < 0 else side for side in sides)


def first(out: Any) -> Tensor:
    """Some versions also return LSE."""
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result


# ---- FlexAttention, compiled, as its users write it: a rule per mask, and a map of the blocks the rule leaves.


def flex() -> Candidate:
    def prepare(shape: Shape, tensors: Tensors) -> Runner:
        device = tensors.q.device
        attend = _flex_attention(compiled=device.type == "cuda")  # elsewhere it has no backward, and says so
        return runner(attention_of(shape, device, attend), tensors, heads_first=True)

    return Candidate(FLEX, prepare)


def attention_of(shape: Shape, device: torch.device, attend: Callable[..., Any]) -> Callable[..., Tensor]:
    """A function of (batch, heads, length, head dim) tensors for one shape."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    rule = rule_of(shape, device)
    blocks = None if rule is None else create_block_mask(rule, None, None, shape.q_seqlen, shape.seqlen, device=device)
    cap = shape.softcap
    options: dict[str, Any] = {"block_mask": blocks, "enable_gqa": shape.group > 1}
    if cap:
        options["score_mod"] = lambda score, b, h, q, kv: cap * torch.tanh(score / cap)

    def attention(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Any:
        if not sinks:
            return attend(q, k, v, **options)
        out, more = attend(q, k, v, return_aux=AuxRequest(lse=True), **options)
        share = torch.sigmoid(more.lse - sinks[0].float()[:, None])  # of the softmax that the sink leaves to the keys
        return (out * share[..., None]).to(q.dtype)

    return attention


def rule_of(shape: Shape, device: torch.device) -> Rule | None:
    if isinstance(shape.attended, IntervalMask):
        rule, shift = mask_rule(shape.attended, device), shape.shift  # the first query is aligned with a later key
        return rule if rule is None or not shift else lambda b, h, q, kv: rule(b, h, q + shift, kv)
    table = ~dropped_keys(shape.attended, slice(0, shape.q_seqlen), shape.q_seqlen, shape.seqlen, device)
    return lambda b, h, q, kv: table[q, kv]


def mask_rule(mask: Mask, device: torch.device) -> Rule | None:
    """Whether a query attends to a key, written as in FlexAttention's own examples; None: always."""
    if mask.is_full:
        return None
    if mask.is_causal:
        return lambda b, h, q, kv: q >= kv
    if isinstance(mask, Window):
        left, right = (2**30 if side < 0 else side for side in (mask.left, mask.right))
        return lambda b, h, q, kv: (q - kv <= left) & (kv - q <= right)
    if isinstance(mask, Prefix):
        length = mask.length
        return lambda b, h, q, kv: (kv < length) | (q >= kv)
    if isinstance(mask, Documents):
        lengths = torch.tensor(mask.lengths, device=device)
        document = torch.repeat_interleave(torch.arange(len(mask.lengths), device=device), lengths)
        if mask.causal:
            return lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv)
        return lambda b, h, q, kv: document[q] == document[kv]
    raise NotImplementedError(f"no rule for a {type(mask).__name__} mask")


def _flex_attention(compiled: bool) -> Callable[..., Any]:
    """Compiled for one shape. Earlier shapes are forgotten: past a few of them PyTorch would stop compiling and run it unfused."""
    import torch._functorch.config as settings
    from torch.nn.attention.flex_attention import flex_attention

    if not compiled:
        return flex_attention
    torch.compiler.reset()
    settings.donated_buffer = False  # a graph that is kept is run backward many times
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
