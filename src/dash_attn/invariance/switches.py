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
        self.before: dict[str, Any] = {}

    @property
    def library(self) -> Any:
        return torch.backends.cuda.preferred_blas_library()

    @library.setter
    def library(self, value: Any) -> None:
        torch.backends.cuda.preferred_blas_library(value)

    @property
    def stance(self) -> Any:
        import torch._dynamo.eval_frame as compiler

        return compiler._stance.stance

    @stance.setter
    def stance(self, value: str) -> None:
        torch.compiler.set_stance(value)

    def changes(self) -> Iterator[Change]:
        yield Change(self, "stance", "force_eager")
        if not torch.cuda.is_available():
            return
        if not isinstance(self.bf16, tuple):
            raise Unsupported(
                f"dash_attn.invariance needs a PyTorch that can switch split-K off, in which"
                f" torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction takes a pair; got PyTorch {torch.__version__}"
            )
        ours = {"library": _cublaslt(), "bf16": WITHOUT_SPLITS, "fp16": WITHOUT_SPLITS}
        if any(getattr(self, name) != value for name, value in ours.items()):
            self.before = {name: getattr(self, name) for name in ours}
        yield from (Change(self, name, value) for name, value in ours.items())

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


def _cublaslt() -> Any:
    return getattr(torch._C, "_BlasBackend").Cublaslt  # noqa: B009


SWITCHES = Switches()
