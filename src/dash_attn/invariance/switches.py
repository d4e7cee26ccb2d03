"""Settings of PyTorch under which a product's order of sums does not depend on its number of rows, and those that were there before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..door import Change
from ..errors import Unsupported

WITHOUT_SPLITS = (False, False)  # neither sums of 16 bits nor K cut into parts that are added later
LOCK = threading.RLock()  # settings are the process's: whoever needs others for a moment keeps all products waiting


def _sums_of(dtype: str) -> property:
    """A pair (reduced precision, split-K), or a bool in versions that have no switch for the second."""
    name, matmul = f"allow_{dtype}_reduced_precision_reduction", torch.backends.cuda.matmul
    return property(lambda _: getattr(torch._C, f"_get_cublas_{name}")(), lambda _, value: setattr(matmul, name, value))


class Switches:
    """PyTorch's settings as attributes, which a door can change and put back."""

    bf16, fp16 = _sums_of("bf16"), _sums_of("fp16")

    def __init__(self) -> None:
        self.ours: dict[str, Any] = {}
        self.before: dict[str, Any] = {}

    @property
    def library(self) -> Any:
        return torch.backends.cuda.preferred_blas_library()

    @library.setter
    def library(self, value: Any) -> None:
        torch.backends.cuda.preferred_blas_library(value)

    @property
    def stance(self) -> Any:
        """Of the compiler; with its backend, which some choose for all."""
        return _compiler()._stance

    @stance.setter
    def stance(self, value: Any) -> None:
        _compiler()._set_stance(value)

    def changes(self, first: bool) -> Iterator[Change]:
        yield Change(self, "stance", _compiler().DynamoStance("force_eager"))
        if not torch.cuda.is_available():
            return
        if not isinstance(self.bf16, tuple):
            raise Unsupported(
                f"dash_attn.invariance needs a PyTorch that can switch split-K off, in which"
                f" torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction takes a pair; got PyTorch {torch.__version__}"
            )
        self.ours = {"library": _cublaslt(), "bf16": WITHOUT_SPLITS, "fp16": WITHOUT_SPLITS}
        if first:  # else a block is open, whose settings are no user's
            self.before = {name: getattr(self, name) for name in self.ours}
        yield from (Change(self, name, value) for name, value in self.ours.items())

    def check(self) -> None:
        """Raises where a product would be computed with other settings than it was proved with."""
        for name, value in self.ours.items():
            if getattr(self, name) != value:
                raise RuntimeError(
                    f"dash_attn.invariance has proved products with {name} {value}; found {getattr(self, name)}: run the backward inside of"
                    " enable(), too, and leave torch.backends.cuda as it is there"
                )

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """For sums over rows, which may be cut as is fastest."""
        if not self.before:
            yield
            return
        with LOCK:
            ours = {name: getattr(self, name) for name in self.before}
            try:
                self._put(self.before)
                yield
            finally:
                self._put(ours)

    def _put(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def precision_of(dtype: torch.dtype) -> str:
    """What choose a kernel, too: settings that let products of this type be less precise."""
    if dtype == torch.float32:
        return str(torch.backends.cuda.matmul.fp32_precision)
    return "sums in fp16" if dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation else ""


def _compiler() -> Any:
    import torch._dynamo.eval_frame as compiler  # which takes long

    return compiler


def _cublaslt() -> Any:
    return getattr(torch._C, "_BlasBackend").Cublaslt  # noqa: B009


SWITCHES = Switches()
