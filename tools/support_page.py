"""The page docs/support.md: what every backend can do, as the code itself answers.

The CPU backend runs each question, forward and backward, on small tensors. GPU backends are asked through `explain` with tensors on the
meta device, which makes every check that a call makes and needs no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import wraps
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import dash_attn
from dash_attn import BooleanMask, Causal, Documents, Full, Mask, Prefix, ScheduleError, TileMap, Window, flash_attn_func
from dash_attn.backends import DEVICE_OF, import_cache
from dash_attn.backends.hopper.support import sm_count
from dash_attn.backends.triton import support as triton_support
from dash_attn.backends.triton.tiles import listed
from dash_attn.call.tensor_checks import DTYPES
from dash_attn.scheduling import GENERATORS
from page_parts import code, numbers_in_words, section, table

LENGTH = 512  # four KV tiles: enough for masks to differ by tiles
BASE_DTYPE = {"cpu": torch.float32, "hopper": torch.bfloat16, "triton": torch.bfloat16}
CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
REFUSALS = (ValueError, NotImplementedError, ScheduleError)  # other errors are mistakes of ours and are not caught
LARGEST_DIM = 512
SOME_DIMS = (64, 96, 128, 192, 256)


@dataclass(frozen=True)
class Question:
    """One call. `heads` are query and KV heads, `lengths` queries and keys, `dims` those of q and k, and of v.

    An option that is a tensor is given as a function of the device.
    """

    name: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    heads: tuple[int, int] = (2, 2)
    lengths: tuple[int, int] = (LENGTH, LENGTH)
    dims: tuple[int, int] = (64, 64)
    dtype: torch.dtype | None = None
    packed: bool = False  # as a packed batch of one sequence

    def tensors(self, backend: str) -> tuple[torch.Tensor, ...]:
        (q_len, kv_len), (q_heads, kv_heads), (dim, v_dim) = self.lengths, self.heads, self.dims
        shapes = ((q_len, q_heads, dim), (kv_len, kv_heads, dim), (kv_len, kv_heads, v_dim))
        device, dtype = "cpu" if backend == "cpu" else "meta", self.dtype or BASE_DTYPE[backend]
        return tuple(torch.zeros(1, *shape, device=device, dtype=dtype) for shape in shapes)


SHORT = Question(lengths=(128, 128))  # of which there are many
MASKS: dict[str, Mask] = {
    "`Full`": Full(),
    "`Causal`": Causal(),
    "`Window`, left": Window(100, 0),
    "`Window`, both sides": Window(100, 100),
    "`Window`, no limit on the right": Window(100, -1),
    "`Documents`": Documents((200, 312)),
    "`Documents`, not causal": Documents((200, 312), causal=False),
    "`Prefix`": Prefix(200),
    "`TileMap`": TileMap(np.eye(4, dtype=bool), 128, 128),
}
OPTIONS = (
    Question("fewer KV heads than query heads", heads=(4, 2)),
    Question("one KV head", heads=(4, 1)),
    Question("causal, more keys than queries", {"causal": True}, lengths=(LENGTH // 2, LENGTH)),
    Question("causal, more queries than keys", {"causal": True}, lengths=(LENGTH, LENGTH // 2)),
    Question("lengths that fill no tile", lengths=(LENGTH - 27, LENGTH - 27)),
    Question("`softmax_scale` > 0", {"softmax_scale": 0.3}),
    Question("`softmax_scale` < 0", {"softmax_scale": -0.3}),
    Question("`softcap`", {"softcap": 20.0}),
    Question("`sinks`", {"sinks": lambda device: torch.zeros(2, device=device)}),
    Question(
        "`dropout_p`, `dropout_seed`", {"dropout_p": 0.1, "dropout_seed": lambda device: torch.zeros(1, dtype=torch.int64, device=device)}
    ),
    Question("`alibi_slopes`", {"alibi_slopes": lambda device: torch.ones(2, device=device)}),
    Question("`mask`, a boolean tensor of whole 64 x 64 blocks", {"mask": BooleanMask(np.kron(np.eye(8), np.ones((64, 64))) > 0)}),
    Question("`mask`, any boolean tensor", {"mask": BooleanMask(np.tri(LENGTH) > 0)}),
    Question("`mask`, a boolean tensor per head", {"mask": BooleanMask(np.stack([np.tri(LENGTH) > 0, np.ones((LENGTH, LENGTH)) > 0]))}),
    Question('`accumulation="unordered"`', {"accumulation": "unordered"}),
    Question("`head_offset`", {"head_offset": 1}),
)
# What flash_attn_func decides itself, before any backend.
ARGUMENTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("`dropout_p=1`", {"dropout_p": 1.0}),
    ("`dropout_p` with a mask of documents", {"dropout_p": 0.1, "mask": Documents((200, 312))}),
    ("`deterministic=True` (the default is as deterministic)", {"deterministic": True}),
    ('`deterministic=True, accumulation="unordered"`', {"deterministic": True, "accumulation": "unordered"}),
    ("`return_lse=True`", {"return_lse": True}),
    ("`return_attn_probs=True` (probabilities are None)", {"return_attn_probs": True}),
    ("`window_size` and `causal` together", {"window_size": (64, 64), "causal": True}),
    ("`mask` and `causal` together", {"mask": Full(), "causal": True}),
)
# Name, capability, and where kernels were more than compiled.
GPUS: tuple[tuple[str, str, str], ...] = (
    ("A100, A30", "8.0", "compiled"),
    ("A10, A40, RTX 30", "8.6", "compiled"),
    ("L4, L40S, RTX 40", "8.9", "compiled"),
    ("H100, H200, GH200", "9.0", "measured on an H200, and so is `triton`, by name"),
    ("B200, GB200", "10.0", "compiled"),
    ("B300, GB300", "10.3", "not compiled"),
    ("RTX 50, RTX PRO Blackwell", "12.0", "compiled"),
    ("DGX Spark", "12.1", "not compiled"),
    ("MI300", "gfx942", "compiled"),
)
GPU_NOTES = (
    "*compiled*: tests compile every kernel for it, within its shared memory, and compare the interpreted source with the CPU backend.",
    "It has never been run there. `dash-attn verify` tests the promises on the machine it runs on.",
    "A GPU that is not in the table of tiles uses those of a related one, or of 8.6, which need the least shared memory.",
)
SCHEDULE_NOTES = (
    "The same on `cpu` and `hopper`. `raises` is a `ScheduleError` that says which masks the schedule serves.",
    "`triton` takes only `auto`: it sums dQ in a separate pass, so there is no order between SMs to choose.",
)


def asked(call: Callable[..., object]) -> Callable[..., str | None]:
    """A function that makes a call and returns the error it gets; None if the backend serves it."""

    @wraps(call)
    def error_of(*args: Any, **kwargs: Any) -> str | None:
        try:
            call(*args, **kwargs)
        except REFUSALS as error:
            return str(error)
        return None

    return error_of


@asked
def refusal(backend: str, question: Question, run: bool = True) -> None:
    """`run=False`: explain the call on every backend."""
    tensors = question.tensors(backend)
    options = {name: value(tensors[0].device) if callable(value) else value for name, value in question.options.items()}
    function: Callable[..., Any] = flash_attn_func
    rest: tuple[Any, ...] = ()
    if question.packed:
        ends = torch.tensor([0, LENGTH], dtype=torch.int32)
        function, rest, tensors = dash_attn.flash_attn_varlen_func, (ends, ends, LENGTH, LENGTH), tuple(x[0] for x in tensors)
    if backend != "cpu" or not run:
        dash_attn.explain(function, *tensors, *rest, backend=backend, predict_time=False, **options)
        return
    result = function(*(x.requires_grad_() for x in tensors), *rest, **options)
    (result[0] if isinstance(result, tuple) else result).sum().backward()


@asked
def refusal_of_gpu(backend: str, major: int, minor: int) -> None:
    properties = SimpleNamespace(name="GPU", major=major, minor=minor, multi_processor_count=1)
    with patch("torch.cuda.get_device_properties", return_value=properties), patch.object(triton_support, "check_triton"):
        # past their caches
        sm_count.__wrapped__(0) if backend == "hopper" else triton_support.architecture_of.__wrapped__(torch.device("cuda"))


def by_backend(what: str, questions: Iterable[Question], ask: Callable[[str, Question], str | None] = refusal) -> list[str]:
    """A table of questions by backend, and below it what the refused ones raise."""
    found = {(backend, question.name): ask(backend, question) for question in questions for backend in DEVICE_OF}
    names = dict.fromkeys(name for _, name in found)
    rows = [[name, *("yes" if found[backend, name] is None else "raises" for backend in DEVICE_OF)] for name in names]
    return [*table([what, *map(code, DEVICE_OF)], rows), *refusals(found)]


def refusals(found: dict[tuple[str, str], str | None]) -> list[str]:
    lines = [f"- {code(backend)}, {name}: {code(error)}" for (backend, name), error in found.items() if error is not None]
    return ["", *lines] if lines else []


def head_dims() -> list[str]:
    rows, refused = [], {}
    for backend in DEVICE_OF:
        dims = (1, 2, 40, *SOME_DIMS, LARGEST_DIM) if backend == "cpu" else range(1, LARGEST_DIM + 1)  # the CPU runs each
        found = {dim: refusal(backend, replace(SHORT, dims=(dim, dim))) for dim in dims}
        served = [dim for dim, error in found.items() if error is None]
        alike = "any" if len(served) == len(dims) else numbers_in_words(served)
        rows.append([code(backend), alike, _unequal_dims(backend)])
        refused[backend, f"head dim {LARGEST_DIM}"] = found[LARGEST_DIM]
    header = ["backend", "head dims, the same for q, k and v", "another for v: (q and k, v)"]
    return [*table(header, rows), *refusals(refused)]


def _unequal_dims(backend: str) -> str:
    pairs = [(a, b) for a in SOME_DIMS for b in SOME_DIMS if a != b]
    served = [pair for pair in pairs if refusal(backend, replace(SHORT, dims=pair)) is None]
    return "any two of them" if served == pairs else ", ".join(map(str, served)) or "none"


def schedules() -> list[str]:
    """Planned for the CPU, not run; every backend plans with the same code."""
    masks = {name: mask for name, mask in MASKS.items() if "," not in name or "left" in name}
    rows = []
    for name in ("auto", *GENERATORS):
        answers = (refusal("cpu", Question(options={"mask": mask, "schedule": name}), run=False) for mask in masks.values())
        rows.append([code(name), *("yes" if answer is None else "raises" for answer in answers)])
    return table(["schedule", *masks], rows)


def arguments() -> list[str]:
    errors = {name: refusal("cpu", Question(name, options)) for name, options in ARGUMENTS}
    return table(["argument", "taken"], [[name, "yes" if error is None else f"raises: {code(error)}"] for name, error in errors.items()])


def packed_sequences() -> list[str]:
    """Masks apply to every sequence; those that fix its length do not fit a packed batch and are left out."""
    asked = {name: {"mask": mask} for name, mask in MASKS.items() if not isinstance(mask, (Documents, TileMap))}
    asked["a named `schedule`"] = {"mask": Causal(), "schedule": "descending"}
    return by_backend("call", [Question(name, options, packed=True) for name, options in asked.items()])


def page() -> str:
    hardware = [["`cpu`", DEVICE_OF["cpu"], "any CPU"]]
    for backend in ("hopper", "triton"):
        taken = [f"{major}.{minor}" for major, minor in CAPABILITIES if refusal_of_gpu(backend, major, minor) is None]
        hardware.append([code(backend), DEVICE_OF[backend], f"compute capability {', '.join(taken)}"])
    caches = by_backend("call", [Question("a cache of keys and values")], asked(lambda backend, _: import_cache(backend)))
    dtypes = [Question(code(str(dtype)), dtype=dtype) for dtype in DTYPES]
    which = '`backend="auto"` takes `hopper` on compute capability 9.0 and `triton` on every other GPU. Their bits differ.'
    # Which backend `auto` takes, and whose tiles the Triton backend takes.
    gpus = [[name, of, "`hopper`" if of == "9.0" else "`triton`", listed(of), ran] for name, of, ran in GPUS]
    gpu_table = table(["GPUs", "compute capability", "backend", "tiles of", "was run"], gpus)
    lines = [
        "# What is supported",
        "",
        "`make pages` writes this page by asking the code: the CPU backend runs every call forward and backward, the GPU",
        "backends answer through `dash_attn.explain(..., backend=...)`. A test fails when the page is out of date.",
        "What is not supported raises an error that says what is. Nothing falls back.",
        *section("Devices", table(["backend", "tensors on", "hardware"], hardware), [which]),
        *section("GPUs", gpu_table, GPU_NOTES),
        *section("Dtypes", by_backend("dtype", dtypes)),
        *section("Head dims", head_dims()),
        *section("Masks", by_backend("mask", [Question(name, {"mask": mask}) for name, mask in MASKS.items()])),
        *section("Shapes and options", by_backend("call", OPTIONS)),
        *section("Schedules", SCHEDULE_NOTES, schedules()),
        *section("Arguments of `flash_attn_func`", ["Decided before any backend is asked."], arguments()),
        *section("Variable lengths: `flash_attn_varlen_func`", packed_sequences()),
        *section("Caches: `flash_attn_with_kvcache`", caches),
    ]
    return "\n".join(lines) + "\n"
