"""What `enable()` can promise for a model, module by module."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import unwrap
from types import FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..door import names_of_code
from .enabling import enable
from .products import way_of
from .rows import ALIGNMENT, BLOCK, OF_NORMS, is_aligned, on_gpu

ATTENTION = "dash_attn"
KERNELS_OF_OTHERS = ("liger_kernel", "apex", "flash_attn", "transformer_engine", "xformers", "kernels", "fla", "mamba_ssm", "bitsandbytes")
MORE_THAN_A_ROW = "a norm over more than a row"
OTHER_LAYERS = (
    (nn.modules.batchnorm._BatchNorm, "statistics of the batch, in training"),
    (nn.modules.conv._ConvNd, "convolutions choose their kernel by size"),
    (nn.RNNBase, "recurrent layers of cuDNN"),
    (nn.MultiheadAttention, "attention that is not dash_attn's"),
    (nn.GroupNorm, MORE_THAN_A_ROW),
    (nn.EmbeddingBag, "sums of rows"),
    (nn.Bilinear, "a product with two inputs"),
)
EXPERTS = ("expert", "router", "moe")  # in the names of classes
OTHER_SUMS = {"addbmm", "addmv", "baddbmm", "bilinear", "bmm", "cdist", "conv1d", "conv2d", "conv3d", "cosine_similarity", "cumprod"}
OTHER_SUMS |= {"cumsum", "einsum", "flex_attention", "grouped_mm", "_grouped_mm", "index_add", "index_add_", "inner", "multi_dot"}
OTHER_SUMS |= {"scaled_dot_product_attention", "scatter_add", "scatter_add_", "std", "std_mean", "sum", "tensordot", "var", "var_mean"}
OF_ROWS = {"mean", "layer_norm", "rms_norm", "normalize", "vector_norm", "logsumexp"}


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
    elif _names_reached(type(module).forward, type(module), set()) & OF_ROWS or isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        yield Finding(name, kind, _proof(module), f"fewer than {OF_NORMS} rows are computed as {OF_NORMS}")


def _product(module: nn.Module, weight: Tensor) -> tuple[str, str]:
    if not on_gpu(weight):
        return "by construction", f"in blocks of {BLOCK} rows"
    way = way_of(weight, getattr(module, "bias", None))
    if weight.requires_grad:
        way_of(weight.t(), None)  # of the backward
    copied = (
        "" if is_aligned(weight) else f"; its weight is copied in every call, as it does not lie at a multiple of {ALIGNMENT['cuda']} bytes"
    )
    return "by construction" if way.block else "proved", f"{way}{copied}"


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
    if len(getattr(module, "normalized_shape", (1,))) != 1:
        return MORE_THAN_A_ROW
    found = _names_reached(owner.forward, owner, set()) & OTHER_SUMS
    return f"its code calls {', '.join(sorted(found))}" if found else None


def _names_reached(function: Any, owner: type, seen: set[Any]) -> set[str]:
    """All names in its code, and in functions of the same file that it calls."""
    function = unwrap(function)
    if not isinstance(function, FunctionType) or function in seen:
        return set()
    seen.add(function)
    found = names_of_code(function.__code__)
    if "ALL_ATTENTION_FUNCTIONS" in found:
        return found  # the others are attention that is not called
    called = [getattr(owner, name, function.__globals__.get(name)) for name in found]
    own = (inner for inner in called if isinstance(inner, FunctionType) and inner.__module__ == function.__module__)
    return found.union(*(_names_reached(inner, owner, seen) for inner in own))


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
