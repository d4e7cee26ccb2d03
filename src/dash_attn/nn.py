"""Self-attention as a module: projections around flash_attn_func."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .attention.autocast import under_autocast
from .attention.functions import flash_attn_func
from .attention.kept_options import kept_options, options_in_words
from .masks import is_whole

MORE_RESULTS = ("return_lse", "return_attn_probs")  # arguments of flash_attn_func that the output projection has no use for
OPTIONS = ("softmax_scale", "deterministic", "mask", "sinks", "schedule", "accumulation", "backend", "head_offset")
Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class SelfAttention(nn.Module):
    """Maps (batch, length, embed_dim) to the same shape; gradients of the attention are bitwise reproducible.

    num_kv_heads: fewer KV heads than query heads (grouped-query attention); None for as many.
    window_size, softcap and the keyword options (schedule, accumulation, backend, head_offset and more) are those of flash_attn_func.
    dropout_p: of the attention weights, in training mode only; with seeds from PyTorch's generator, unless `forward` is given others.
    alibi_slopes: (num_heads,) numbers, kept as a buffer.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        bias: bool = False,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        dropout_p: float = 0.0,
        alibi_slopes: Tensor | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if bias is not True and bias is not False:
            raise TypeError(f"bias must be True or False; got {bias!r}")
        _check_sizes(embed_dim, num_heads, num_kv_heads)
        _check_options(options)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, embed_dim // num_heads
        self.options = kept_options({"causal": causal, "window_size": window_size, "softcap": softcap, **options}, dropout_p)
        self.dropout_p = dropout_p
        self.alibi_slopes: Tensor | None
        self.register_buffer("alibi_slopes", None if alibi_slopes is None else _slopes(alibi_slopes, num_heads))
        self.qkv = nn.Linear(embed_dim, (num_heads + 2 * num_kv_heads) * self.head_dim, bias=bias)
        self.out = nn.Linear(embed_dim, embed_dim, bias=bias)

    def forward(self, x: Tensor, rotate: Rotate | None = None, dropout_seed: Tensor | None = None) -> Tensor:
        """rotate: maps q and k, (batch, length, heads, head_dim), to what attends, for example by rotary embedding.
        dropout_seed: as in flash_attn_func.
        """
        if x.ndim != 3 or x.shape[-1] != self.qkv.in_features:
            raise ValueError(f"x must be 3-d (batch, length, {self.qkv.in_features}); got shape {tuple(x.shape)}")
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=2)
        if rotate is not None:
            q, k = rotate(q, k)
            q, k, v = under_autocast(q, k, v)  # angles in fp32 make q and k fp32 again
        dropout_p = self.dropout_p if self.training else 0.0
        attended = flash_attn_func(q, k, v, dropout_p, alibi_slopes=self.alibi_slopes, dropout_seed=dropout_seed, **self.options)
        out: Tensor = self.out(attended.flatten(-2))
        return out

    def extra_repr(self) -> str:
        sizes = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        dropout = f"dropout_p={self.dropout_p}, " if self.dropout_p else ""
        return f"{sizes}, {dropout}{options_in_words(self.options)}"


def _slopes(slopes: Tensor, heads: int) -> Tensor:
    if not isinstance(slopes, Tensor) or tuple(slopes.shape) != (heads,):
        raise ValueError(f"alibi_slopes must be a tensor of {heads} numbers, one per head; got {slopes!r}")
    return slopes.detach().clone()


def _check_options(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name in MORE_RESULTS:
            raise TypeError(f"SelfAttention returns its output alone: it does not take {name}; got {name}={value!r}")
        if name not in OPTIONS:
            raise TypeError(f"SelfAttention got an unexpected keyword argument {name!r}; besides its own it takes {', '.join(OPTIONS)}")


def _check_sizes(embed_dim: int, num_heads: int, num_kv_heads: int) -> None:
    sizes = f"embed_dim={embed_dim!r}, num_heads={num_heads!r}, num_kv_heads={num_kv_heads!r}"
    if not all(is_whole(size) and size >= 1 for size in (embed_dim, num_heads, num_kv_heads)):
        raise ValueError(f"embed_dim, num_heads and num_kv_heads must be whole numbers >= 1; got {sizes}")
    if embed_dim % num_heads or num_heads % num_kv_heads:
        raise ValueError(f"embed_dim must be a multiple of num_heads, and num_heads of num_kv_heads; got {sizes}")
