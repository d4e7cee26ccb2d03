"""torchtitan: `enable(model_config)`, or by name, `--override.imports dash_attn.integrations.torchtitan.dash_attention`.

torchtitan looks overrides up in the module that it imports, so this module imports torchtitan.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..door import refuse_unknown
from ..libraries import check_library
from ._torchtitan_calls import WHO, WITHOUT_EFFECT, Asked, attend, attend_documents, refuse_masks

check_library("torchtitan", WHO)  # before what follows, which earlier ones lack

import spmd_types  # noqa: E402
from torchtitan.config import derive, override  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention, VarlenMetadata  # noqa: E402
from torchtitan.models.common.decoder import Decoder  # noqa: E402
from torchtitan.protocols.model import BaseModel  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402

__all__ = ["DashDocumentAttention", "DashScaledDotProductAttention", "dash_attention", "enable"]


class _Ranks:
    """Which heads of the model this rank has: torchtitan hands each tensor-parallel rank its own, in order."""

    tp_rank = 0

    def parallelize(self, parallel_dims: Any) -> None:
        if parallel_dims.cp_enabled:
            raise ValueError(f"{WHO} does not support torchtitan's context parallelism: context_parallel_degree must be 1")
        mesh = parallel_dims.get_optional_mesh("tp")
        self.tp_rank = 0 if mesh is None else mesh.get_local_rank()
        super().parallelize(parallel_dims)  # type: ignore[misc]

    def head_offset(self, key: Tensor) -> int:
        if spmd_types.is_type_checking():
            raise ValueError(f"{WHO} does not support debug.spmd_typechecking; leave it off")
        return self.tp_rank * key.shape[2]


class DashDocumentAttention(_Ranks, VarlenAttention):  # type: ignore[misc]
    """Attention inside documents, causal or by a window. Its Config is a VarlenAttention.Config, for which torchtitan makes masks."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config) -> None:
        Module.__init__(self)  # not VarlenAttention's, which activates another flash attention for the whole process
        self.window_size = config.window_size

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        out_transform: Any = None,
        **other: Any,
    ) -> Tensor:
        refuse_unknown(WHO, other, WITHOUT_EFFECT, "which the layer passed")
        if not isinstance(attention_masks, VarlenMetadata):
            refuse_masks(attention_masks, "torchtitan's VarlenMetadata")
        asked = Asked(scale, self.head_offset(k_BLNH), self.window_size, out_transform)
        return attend_documents(q_BLNH, k_BLNH, v_BLNH, attention_masks, asked)


class DashScaledDotProductAttention(_Ranks, ScaledDotProductAttention):  # type: ignore[misc]
    """Causal or full attention without documents."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):  # type: ignore[misc]
        pass

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        is_causal: bool = True,
        **other: Any,
    ) -> Tensor:
        refuse_unknown(WHO, other, WITHOUT_EFFECT, "which the layer passed")
        if attention_masks is not None:
            refuse_masks(attention_masks, "None")
        return attend(q_BLNH, k_BLNH, v_BLNH, Asked(scale, self.head_offset(k_BLNH), (-1, 0 if is_causal else -1)))


OURS = {
    VarlenAttention.Config: DashDocumentAttention.Config,
    ScaledDotProductAttention.Config: DashScaledDotProductAttention.Config,
    FlexAttention.Config: DashDocumentAttention.Config,
}


def enable(config: Any) -> Any:
    """Replace every inner attention in a model's config, in place, and return it. Raises if one cannot be replaced, or none is there."""
    found = [place for kind in OURS for place in config.traverse(kind)]
    ours = [_ours(config, name, inner) for name, inner, _, _ in found]  # all, before anything is changed
    if not found:
        raise ValueError(f"{WHO} found no attention of torchtitan in {type(config).__qualname__}")
    for (_, _, parent, attribute), mine in zip(found, ours, strict=True):
        if isinstance(parent, list):
            parent[attribute] = mine
        else:
            setattr(parent, attribute, mine)
    return config


def _ours(model: Any, name: str, inner: Any) -> Any:
    if isinstance(inner, tuple(OURS.values())):
        return inner
    if type(inner) not in OURS:
        raise ValueError(f"{WHO} does not know {type(inner).__qualname__} at {name}, and what it computes")
    if type(inner) is FlexAttention.Config:
        _check_flex(model, name)
    return derive(inner, OURS[type(inner)])


def _check_flex(model: Any, name: str) -> None:
    """FlexAttention's masks are functions. Those of `Decoder` are known: causal inside documents, as its VarlenMetadata says, too."""
    owner = type(model)._owner
    of_a_layer = name.startswith("layers.") and name.endswith(".attention.inner_attention")
    if not (of_a_layer and issubclass(owner, Decoder) and owner.get_attention_masks is Decoder.get_attention_masks):
        raise ValueError(
            f"{WHO} knows the FlexAttention masks of torchtitan's Decoder only; {owner.__name__} makes its own for {name}."
            ' Build the model with attn_backend="varlen", if it has that'
        )


@override(target=BaseModel.Config, description="bitwise reproducible attention of dash-attn")  # type: ignore[untyped-decorator]
def dash_attention(config: Any) -> Any:
    """torchtitan's name for `enable`. It claims the whole model, so that a model without a known attention raises."""
    return enable(config)
