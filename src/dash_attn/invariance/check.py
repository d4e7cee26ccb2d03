"""What `enable()` can promise for a model, module by module."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import unwrap
from types import FunctionType
from typing import NamedTuple

from torch import Tensor, nn

from ..door import names_of, names_of_code
from .enabling import enable
from .products import way_of
from .rows import BLOCK, OF_NORMS, on_gpu

ATTENTION = "dash_attn"
KERNELS_OF_OTHERS = ("liger_kernel", "apex", "flash_attn", "transformer_engine", "xformers", "kernels", "fla", "mamba_ssm", "bitsandbytes")
OTHER_LAYERS = (
    (nn.modules.batchnorm._BatchNorm, "statistics of the batch, in training"),
    (nn.modules.conv._ConvNd, "convolutions choose their kernel by size"),
    (nn.RNNBase, "recurrent layers of cuDNN"),
    (nn.MultiheadAttention, "attention that is not dash_attn's"),
    (nn.GroupNorm, "a norm over more than a row"),
)
EXPERTS = ("expert", "router", "moe")  # in the names of classes
OTHER_SUMS = {"einsum", "bmm", "baddbmm", "conv1d", "conv2d", "grouped_mm", "_grouped_mm", "cumsum", "var", "std", "vector_norm"}
OF_ROWS = {"mean", "layer_norm", "rms_norm", "normalize"}


class Finding(NamedTuple):
    """holds: "proved" on this GPU, "by construction", or "no"."""

    module: str
    kind: str
    holds: str
    why: str


class Report(NamedTuple):
    findings: tuple[Finding, ...]

    @property
    def uncovered(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.holds == "no")

    def __str__(self) -> str:
        """One line for modules that are alike."""
        alike: dict[tuple[str, str, str], list[str]] = {}
        for module, *rest in self.findings:
            alike.setdefault(tuple(rest), []).append(module)  # type: ignore[arg-type]
        lines = [f"{holds:15}  {kind}: {why} ({_named(names)})" for (kind, holds, why), names in alike.items()]
        return "\n".join(sorted(lines, key=lambda line: not line.startswith("no ")))


def check(model: nn.Module) -> Report:
    """What holds for each module inside `enable()`, what it costs, and what is not covered. On a GPU products are probed now, so that
    the first forward need not. It goes by classes and by the names in their code; it cannot see what a forward does in other ways."""
    with enable():
        return Report(tuple(found for name, module in model.named_modules() for found in _findings(name or "the model", module)))


def _findings(name: str, module: nn.Module) -> Iterator[Finding]:
    kind = type(module).__name__
    why = not_covered(module)
    weight = getattr(module, "weight", None)
    if why is not None:
        yield Finding(name, kind, "no", why)
    elif isinstance(module, nn.Embedding):
        yield Finding(name, kind, "by construction", "rows are looked up")
    elif isinstance(weight, Tensor) and weight.ndim == 2:
        yield Finding(name, kind, *_product(module, weight.t() if kind == "Conv1D" else weight))
    elif names_of(type(module)) & OF_ROWS or isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        yield Finding(name, kind, _proof(module), f"fewer than {OF_NORMS} rows are computed as {OF_NORMS}")


def _product(module: nn.Module, weight: Tensor) -> tuple[str, str]:
    if not on_gpu(weight):
        return "by construction", f"in blocks of {BLOCK} rows"
    way = way_of(weight, getattr(module, "bias", None))
    if weight.requires_grad:
        way_of(weight.t(), None)  # of the backward
    return "by construction" if way.block else "proved", str(way)


def _proof(module: nn.Module) -> str:
    return "proved" if any(parameter.is_cuda for parameter in module.parameters()) else "by construction"


def not_covered(module: nn.Module) -> str | None:
    """Why, in words."""
    owner, name = type(module), type(module).__name__
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", ATTENTION)
    if implementation.removeprefix("paged|") != ATTENTION:
        return f"attn_implementation={implementation!r} is not dash_attn's"
    if owner.__module__.split(".")[0] in KERNELS_OF_OTHERS or "forward" in vars(module):
        return "a kernel of another library, whose sums are not known"
    if any(word in name.lower() for word in EXPERTS):
        return "experts get as many rows as are sent to them, by products of other functions"
    if isinstance(module, nn.Dropout) and module.training and module.p:
        return "dropout in training: call model.eval(), or set it to 0"
    for layer, why in OTHER_LAYERS:
        if isinstance(module, layer):
            return why
    forward = unwrap(owner.forward)
    found = names_of_code(forward.__code__) & OTHER_SUMS if isinstance(forward, FunctionType) else set()
    return f"its code calls {', '.join(sorted(found))}" if found else None


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
