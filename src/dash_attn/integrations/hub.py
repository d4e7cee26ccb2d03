"""The functions of a kernel on the Hugging Face Hub (tools/hub_kernel.py writes one): ours, with sinks also by transformers' name.

transformers looks for `s_aux` among the arguments, and without it leaves out a model's sinks in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import Any

from torch import Tensor

from ..attention import functions, kv_cache, varlen

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def _with_s_aux(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, s_aux: Tensor | None = None, **kwargs: Any) -> Any:
        if s_aux is not None:
            if kwargs.get("sinks") is not None:
                raise TypeError(f"{function.__name__} takes sinks or s_aux, which are two names for one thing; got both")
            kwargs["sinks"] = s_aux
        return function(*args, **kwargs)

    shown = signature(function)
    added = Parameter("s_aux", Parameter.KEYWORD_ONLY, default=None, annotation="Tensor | None")
    call.__signature__ = shown.replace(parameters=[*shown.parameters.values(), added])  # type: ignore[attr-defined]
    return call


flash_attn_func = _with_s_aux(functions.flash_attn_func)
flash_attn_varlen_func = _with_s_aux(varlen.flash_attn_varlen_func)
flash_attn_with_kvcache = _with_s_aux(kv_cache.flash_attn_with_kvcache)
