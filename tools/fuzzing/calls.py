"""Draws a call of each function. `draw` gives the same call for the same seed and number."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dash_attn import Mask, flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
from dash_attn.distributed import context_parallel_attention
from dash_attn.integrations import sdpa
from dash_attn.nn import SelfAttention
from fuzzing import caches, drawing, shared
from fuzzing.call import Call, Leaves, Modifiers, OutAndLse, Sequence, answers, each, end_to_end, in_rows
from fuzzing.drawing import Attended, Numbers, Shape, chance

ANY_MASK = ("ascending", "descending", "alternating", "weave", "spt")  # schedules
Draw = Callable[[Random, str], Call]


def modifiers(random: Random, numbers: Numbers, shape: Shape) -> Modifiers:
    heads, count = shape.heads[0], len(shape.lengths)
    found = Modifiers(drawing.scores(random, numbers.device), head_offset=random.choice((0, 0, 0, 1, 3)))
    if chance(random, 0.15):
        found.dropout_p, found.seeds = random.choice((0.1, 0.5, 0.83)), drawing.seeds(random, count, numbers.device)
    if chance(random, 0.15):
        sizes = (heads,) if chance(random, 0.5) else (count, heads)
        found.slopes = numbers.draw(*sizes, dtype=torch.float32).abs() / 8
    return found


def with_sinks(random: Random, numbers: Numbers, shape: Shape, leaves: Leaves) -> Leaves:
    if not chance(random, 0.2):
        return leaves
    dtype = torch.float64 if shape.dtype == torch.float64 else torch.float32
    sinks = numbers.draw(shape.heads[0], dtype=dtype)
    if chance(random, 0.2):
        sinks[random.randrange(len(sinks))] = -torch.inf
    return {**leaves, "sinks": sinks}


def with_gradients(call: Call, random: Random, numbers: Numbers) -> Call:
    """And gradients of what it returns, sometimes of the LSE too."""
    of_lse = chance(random, 0.3)

    def cotangents(out: Tensor, lse: Tensor | None) -> tuple[Tensor, ...]:
        found = [numbers.laid_out(*out.shape, dtype=out.dtype)]
        return tuple(found) if lse is None or not of_lse else (*found, numbers.draw(*lse.shape, dtype=lse.dtype))

    call.draw_cotangents = cotangents
    return call


def dense_masks(random: Random, shape: Shape, matrices: bool = True) -> tuple[dict[str, Any], list[Attended], Mask | None]:
    """As arguments of the call, of each sequence, and by name where it has one."""
    (q_len, kv_len), count = shape.lengths[0], len(shape.lengths)
    sort = random.random()
    if matrices and sort < 0.3:
        attended = drawing.matrix_mask(random, count, shape.heads[0], q_len, kv_len)
        return attended[0].given, attended, None
    if sort < 0.6:
        given, mask = drawing.simple_mask(random, q_len, kv_len)
    else:
        mask = drawing.named_mask(random, q_len, kv_len)
        given = {"mask": mask}
    return given, [Attended(given, drawing.by_definition(mask, q_len, kv_len).keep)] * count, mask


def dense(random: Random, device: str) -> Call:
    shape = drawing.shape(random, device)
    numbers, count = Numbers(random, device), len(shape.lengths)
    given, attended, mask = dense_masks(random, shape)
    sizes = shape.sizes(*shape.lengths[0]).items()
    leaves = {name: numbers.laid_out(count, *size, dtype=shape.dtype, scale=random.choice((1, 1, 3))) for name, size in sizes}
    leaves = with_sinks(random, numbers, shape, leaves)
    own = modifiers(random, numbers, shape)
    own.schedule = drawing.schedule(random, device, mask, shape, own.head_offset)
    ordered = not chance(random, 0.06)
    options = {**{name: on(x, device) for name, x in given.items()}, **own.given(), "accumulation": "ordered" if ordered else "unordered"}
    words, run = f"{shape} {in_words(options)}", answers(flash_attn_func, **options)
    return with_gradients(Call("flash_attn_func", words, leaves, run, each, in_rows, attended, own, ordered), random, numbers)


def on(x: Any, device: str) -> Any:
    return x.to(device) if isinstance(x, Tensor) else x


def in_words(options: dict[str, Any]) -> str:
    def short(x: Any) -> str:
        return f"tensor{tuple(x.shape)}" if isinstance(x, Tensor) else str(x)[:60].replace("\n", " ")

    return " ".join(f"{name}={short(x)}" for name, x in options.items() if x is not None and x != "auto")  # type: ignore[comparison-overlap]


def packed_in_one(random: Random, device: str) -> Call:
    """flash_attn_qkvpacked_func and flash_attn_kvpacked_func."""
    whole = chance(random, 0.5)
    shape = drawing.shape(random, device, square=whole)
    heads = (shape.heads[0], shape.heads[0]) if whole else shape.heads
    shape = shape._replace(heads=heads, dims=(shape.dims[0], shape.dims[0]))
    numbers, count, (q_len, kv_len), dim = Numbers(random, device), len(shape.lengths), shape.lengths[0], shape.dims[0]
    given, attended, mask = dense_masks(random, shape)
    together = numbers.draw(count, kv_len, 3 if whole else 2, heads[1], dim, dtype=shape.dtype)
    leaves = {"qkv": together} if whole else {"q": numbers.laid_out(count, q_len, heads[0], dim, dtype=shape.dtype), "kv": together}
    leaves = with_sinks(random, numbers, shape, leaves)
    own = modifiers(random, numbers, shape)
    own.schedule = drawing.schedule(random, device, mask, shape, own.head_offset)
    options = {**{name: on(x, device) for name, x in given.items()}, **own.given()}

    def run(leaves: Leaves) -> OutAndLse:
        rest = {**options, "sinks": leaves.get("sinks"), "return_lse": True}
        out: tuple[Tensor, Tensor] = (
            flash_attn_qkvpacked_func(leaves["qkv"], **rest) if whole else flash_attn_kvpacked_func(leaves["q"], leaves["kv"], **rest)
        )
        return out

    def cut(leaves: Leaves) -> list[Sequence]:
        q, k, v = leaves["qkv"].unbind(2) if whole else (leaves["q"], *leaves["kv"].unbind(2))
        return each({"q": q, "k": k, "v": v})

    name = "flash_attn_qkvpacked_func" if whole else "flash_attn_kvpacked_func"
    call = Call(name, f"{shape} {in_words(options)}", leaves, run, cut, in_rows, attended, own)
    return with_gradients(call, random, numbers)


def packed(random: Random, device: str) -> Call:
    """flash_attn_varlen_func."""
    shape = drawing.shape(random, device, same_lengths=False)
    numbers = Numbers(random, device)
    given, attended = packed_masks(random, shape, device)
    q_lengths, kv_lengths = map(list, zip(*shape.lengths, strict=True))
    sizes = shape.sizes(sum(q_lengths), sum(kv_lengths)).items()
    leaves = {name: numbers.laid_out(*size, dtype=shape.dtype) for name, size in sizes}
    leaves = with_sinks(random, numbers, shape, leaves)
    own = modifiers(random, numbers, shape)
    own.schedule = "auto" if chance(random, 0.8) or device == "cuda" else random.choice(ANY_MASK)
    room = random.choice((0, 0, 100))
    offsets = drawing.places(q_lengths, device), drawing.places(kv_lengths, device), max(q_lengths) + room, max(kv_lengths) + room
    options = {**given, **own.given()}

    def cut(leaves: Leaves) -> list[Sequence]:
        parts = [leaves[name].split(lengths) for name, lengths in (("q", q_lengths), ("k", kv_lengths), ("v", kv_lengths))]
        return [(q[None], k[None], v[None]) for q, k, v in zip(*parts, strict=True)]

    run = answers(flash_attn_varlen_func, *offsets, **options)
    call = Call("flash_attn_varlen_func", f"{shape} {in_words(options)}", leaves, run, cut, end_to_end, attended, own)
    return with_gradients(call, random, numbers)


def packed_masks(random: Random, shape: Shape, device: str) -> tuple[dict[str, Any], list[Attended]]:
    """One for all sequences, or one for each."""
    if chance(random, 0.25) and device == "cpu":
        each = [drawing.named_mask(random, *pair) for pair in shape.lengths]
        attended = [drawing.by_definition(mask, *pair) for mask, pair in zip(each, shape.lengths, strict=True)]
        given = [one.given["mask"] for one in attended]
        for number, pair in enumerate(shape.lengths):
            if chance(random, 0.4):
                (attended[number],) = drawing.matrix_mask(random, 1, shape.heads[0], *pair)
                given[number] = attended[number].given["mask"]
        return {"mask": given}, attended
    options, mask = drawing.simple_mask(random, 50, 50)
    return options, [Attended(options, drawing.by_definition(mask, *pair).keep) for pair in shape.lengths]


def through_sdpa(random: Random, device: str) -> Call:
    """torch.nn.functional.scaled_dot_product_attention inside of our door."""
    shape = drawing.shape(random, device)
    numbers, count, (q_len, kv_len) = Numbers(random, device), len(shape.lengths), shape.lengths[0]
    (heads, kv_heads), (dim, v_dim) = shape.heads, shape.dims
    sizes = {"q": (heads, q_len, dim), "k": (kv_heads, kv_len, dim), "v": (kv_heads, kv_len, v_dim)}
    of_keys = 1 if chance(random, 0.15) else count  # as PyTorch's broadcasts
    leaves = {name: numbers.laid_out(count if name == "q" else of_keys, *each, dtype=shape.dtype) for name, each in sizes.items()}
    sort = random.choice(("none", "causal", "booleans", "numbers"))
    options: dict[str, Any] = {"enable_gqa": heads != kv_heads, "scale": random.choice((None, None, 0.3))}
    keep = torch.ones(1, q_len, kv_len, dtype=torch.bool)
    attended = [Attended({}, keep)] * count
    if sort == "causal":
        options["is_causal"] = True
        attended = [Attended({"mask": keep.tril()}, keep.tril())] * count
    elif sort != "none":
        leading = random.choice(((), (1, 1), (count, 1), (1, heads), (count, heads)))
        found = drawing.matrix(random, *leading, q_len, kv_len)
        options["attn_mask"] = on(found if sort == "booleans" else torch.zeros(found.shape).masked_fill_(~found, -torch.inf), device)
        attended = [Attended({"mask": found}, own) for own in found.expand(count, heads, q_len, kv_len)]
    own = Modifiers({} if options["scale"] is None else {"softmax_scale": options["scale"]})

    def run(leaves: Leaves) -> OutAndLse:
        with sdpa.enable():
            return functional.scaled_dot_product_attention(*map(leaves.get, "qkv"), **options), None

    def cut(leaves: Leaves) -> list[Sequence]:
        return each({name: x.expand(count, -1, -1, -1).transpose(1, 2) for name, x in leaves.items()})

    def join(_: Leaves, outs: list[Tensor], lses: list[Tensor]) -> OutAndLse:
        return torch.cat(outs).transpose(1, 2), None

    words = f"{shape} {in_words(options)}" + (" one sequence of keys" if of_keys < count else "")
    call = Call("scaled_dot_product_attention", words, leaves, run, cut, join, attended, own)
    call.comparable = sort != "causal" and of_keys == count  # a matrix and a name of the same mask may be planned apart
    return with_gradients(call, random, numbers)


def module(random: Random, device: str) -> Call:
    """nn.SelfAttention, in float32 or float64: its products are PyTorch's."""
    shape = drawing.shape(random, device, square=True)
    if device == "cpu":
        shape = shape._replace(dtype=random.choice((torch.float32, torch.float64)))
    numbers, length, (heads, kv_heads) = Numbers(random, device), shape.lengths[0][0], shape.heads
    dim = random.choice((64, 128)) if device == "cuda" else random.randint(1, 24)
    given, attended, _ = dense_masks(random, shape, matrices=False)
    scores = drawing.scores(random, device)
    layer = SelfAttention(heads * dim, heads, kv_heads, bias=chance(random, 0.5), **{"causal": False, **given}, **scores)
    layer = layer.to(device, shape.dtype)
    leaves = {"x": numbers.draw(len(shape.lengths), length, heads * dim, dtype=shape.dtype)}
    leaves |= {name: x.detach() for name, x in layer.named_parameters()}
    split = heads, kv_heads, kv_heads

    def run(leaves: Leaves) -> OutAndLse:
        own = {name: x for name, x in leaves.items() if name != "x"}
        return torch.func.functional_call(layer, own, (leaves["x"],)), None

    def cut(leaves: Leaves) -> list[Sequence]:
        projected = functional.linear(leaves["x"], leaves["qkv.weight"], leaves.get("qkv.bias"))
        q, k, v = projected.unflatten(-1, (-1, dim)).split(split, 2)
        return each({"q": q, "k": k, "v": v})

    def join(leaves: Leaves, outs: list[Tensor], lses: list[Tensor]) -> OutAndLse:
        return functional.linear(torch.cat(outs).flatten(-2), leaves["out.weight"], leaves.get("out.bias")), None

    words = f"{shape} dim {dim} {in_words({**given, **scores})}"
    call = Call("nn.SelfAttention", words, leaves, run, cut, join, attended, Modifiers(scores))
    call.comparable = False  # products of other sizes may round differently
    return with_gradients(call, random, numbers)


def of_one_rank(random: Random, device: str) -> Call:
    """context_parallel_attention of one process, with documents or without."""
    shape = drawing.shape(random, device, square=True)
    shape = shape._replace(lengths=tuple((max(q, 1), max(k, 1)) for q, k in shape.lengths))
    numbers, count, length = Numbers(random, device), len(shape.lengths), shape.lengths[0][0]
    given, attended, _ = dense_masks(random, shape, matrices=False)
    leaves = {name: numbers.laid_out(count, *size, dtype=shape.dtype) for name, size in shape.sizes(length, length).items()}
    leaves = with_sinks(random, numbers, shape, leaves)
    own = modifiers(random, numbers, shape)
    options = {**given, **own.given(), "sharding": "contiguous"}
    run = answers(context_parallel_attention, **options)
    call = Call("context_parallel_attention", f"{shape} {in_words(options)}", leaves, run, each, in_rows, attended, own)
    return with_gradients(call, random, numbers)


FUNCTIONS: dict[Draw, float] = {  # and how often, in a hundred calls
    dense: 42.8,
    packed: 19,
    packed_in_one: 9,
    caches.cached: 10,
    caches.in_pages: 4,
    through_sdpa: 8,
    module: 4,
    of_one_rank: 3,
    shared.played: 0.2,
}


def draw(seed: int, number: int, device: str) -> Call:
    random = Random(f"{seed}/{number}")
    functions = {function: often for function, often in FUNCTIONS.items() if function is not shared.played or device == "cpu"}
    (function,) = random.choices(list(functions), list(functions.values()))
    torch.manual_seed(random.getrandbits(31))
    return function(random, device)
