"""FlashAttention packages, found by importing them. What a version can do is read off the arguments its functions take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from ...masks import Prefix, Window
from .candidates import Candidate, Runner, Tensors, packed, runner
from .matrices import Matrix
from .shape import PASSES, Shape

# Modules with `flash_attn_func` and `flash_attn_varlen_func`, which take causal= and deterministic=.
PACKAGES = {
    "FlashAttention-4": "flash_attn.cute",
    "FlashAttention-3": "flash_attn_interface",
    "FlashAttention-2": "flash_attn",
}
SINKS = ("learnable_sink", "s_aux")  # what versions call it


def package_peers() -> tuple[list[Candidate], dict[str, str]]:
    """Candidates, and why the others are missing."""
    made: list[Candidate] = []
    missing = {}
    for name, module in PACKAGES.items():
        try:
            found = import_module(module)
            package = Package(found.flash_attn_func, getattr(found, "flash_attn_varlen_func", None))
        except Exception as error:  # a package built for another PyTorch fails in many ways
            missing[name] = first_line(error)
        else:
            made += [package.candidate(name, False), package.candidate(f"{name} deterministic", True)]
    return made, missing


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


class Package:
    """The two functions of a package: of rows, and of packed tokens."""

    def __init__(self, of_rows: Callable[..., Any], of_tokens: Callable[..., Any] | None) -> None:
        self.of_rows, self.of_tokens = of_rows, of_tokens

    def candidate(self, name: str, deterministic: bool) -> Candidate:
        def prepare(shape: Shape, tensors: Tensors) -> Runner:
            return self.prepare(shape, tensors, deterministic)

        return Candidate(name, prepare, deterministic, ("backward",) if deterministic else PASSES, refuses=self.refuses)

    def refuses(self, shape: Shape) -> str | None:
        function = self.function(shape)
        if function is None:
            return "has no function for packed sequences"
        if isinstance(shape.attended, (Prefix, Matrix)):
            return "has no prefix mask" if isinstance(shape.attended, Prefix) else "has no boolean matrices"
        known = inspect.signature(function).parameters
        if isinstance(shape.attended, Window) and "window_size" not in known:
            return "has no windows"
        if shape.softcap and "softcap" not in known:
            return "has no softcap"
        return "has no sinks" if shape.sinks and not set(SINKS) & set(known) else None

    def function(self, shape: Shape) -> Callable[..., Any] | None:
        """Documents in a row are packed sequences to these packages."""
        return self.of_tokens if shape.sequences else self.of_rows

    def prepare(self, shape: Shape, tensors: Tensors, deterministic: bool) -> Runner:
        function = self.function(shape)
        assert function is not None  # else it had refused
        options = {"deterministic": deterministic, **self._options(function, shape)}
        sink = next((name for name in SINKS if name in inspect.signature(function).parameters), "")

        def of_rows(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
            return _first(function(q, k, v, **options, **({sink: sinks[0]} if sinks else {})))

        def of_tokens(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int) -> Tensor:
            lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
            return _first(function(q, k, v, **lengths, **options))

        return runner(packed(of_tokens, shape, tensors.q.device) if shape.sequences else of_rows, tensors)

    @staticmethod
    def _options(function: Callable[..., Any], shape: Shape) -> dict[str, Any]:
        mask = shape.attended
        options: dict[str, Any] = {"causal": shape.sequences_causal if shape.sequences else shape.causal}
        if isinstance(mask, Window):
            unlimited = inspect.signature(function).parameters["window_size"].default[0]  # -1 or None
            options["window_size"] = tuple(unlimited if side < 0 else side for side in (mask.left, mask.right))
        if shape.softcap:
            options["softcap"] = shape.softcap
        return options


def _first(out: Any) -> Tensor:
    """Some versions also return LSE."""
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result
