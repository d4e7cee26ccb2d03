"""What attention of transformers' models did, call by call, to be compared with the training forward on the same tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dash_attn import flash_attn_func
from dash_attn.integrations import huggingface
from dash_attn.integrations._layer_mask import LayerMask
from dense import same_bits


@dataclass
class Chunk:
    """New tokens of one layer: (heads, tokens, dim), and what attention made of them, (tokens, heads, dim)."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    options: dict[str, Any]


@dataclass
class Recorder:
    """Our attention, with a note of every call by layer and sequence."""

    chains: dict[tuple[int, int], list[Chunk]] = field(default_factory=dict)
    padding: dict[int, int] = field(default_factory=dict)  # tokens of a sequence, on the left

    def attention(self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: LayerMask, **arguments: Any) -> Any:
        options = {
            "softmax_scale": arguments.get("scaling"),
            "window_size": (-1 if attention_mask.windows in (None, (None,)) else attention_mask.windows[0] - 1, 0),
            "sinks": arguments.get("s_aux"),
        }
        ends = arguments["cu_seq_lens_q"].tolist() if "cache" in arguments else None
        end = attention_mask.first_key + attention_mask.keys
        new = slice(end - query.shape[2], end)
        out, weights = huggingface.attention(module, query, key, value, attention_mask, **arguments)
        if ends is None:
            for i in range(len(query)):
                chunk = Chunk(query[i], key[i, :, new].clone(), value[i, :, new].clone(), out[i], options)
                self.chains.setdefault((module.layer_idx, i), []).append(chunk)
        else:
            for start, end in pairwise(ends):
                rows = slice(start, end)
                chunk = Chunk(query[0, :, rows], key[0, :, rows].clone(), value[0, :, rows].clone(), out[0, rows], options)
                self._join(module.layer_idx, int(arguments["position_ids"][0, start]), chunk)
        return out, weights

    def _join(self, layer: int, position: int, chunk: Chunk) -> None:
        """Requests of a batch are told apart by their lengths."""
        found = [number for (of, number) in self.chains if of == layer and self.length(layer, number) == position]
        if position == 0:
            found = [len(self.chains)]
        assert len(found) == 1, "the lengths of this test must tell requests apart"
        self.chains.setdefault((layer, found[0]), []).append(chunk)

    def length(self, layer: int, number: int) -> int:
        return sum(chunk.q.shape[1] for chunk in self.chains[layer, number])

    def differing(self) -> list[str]:
        """Layers and sequences of which a token has other bits than in the training forward."""
        bad = []
        for (layer, number), chunks in self.chains.items():
            *inputs, out = (x[:, self.padding.get(number, 0) :].contiguous() for x in self.joined(layer, number))
            if not same_bits(out, flash_attn_func(*inputs, causal=True, **chunks[0].options)):
                bad.append(f"layer {layer}, sequence {number}")
        return bad

    def joined(self, layer: int, number: int) -> list[Tensor]:
        """q, k, v and output of all tokens of a sequence."""
        chunks = self.chains[layer, number]
        heads_first = [torch.cat([getattr(chunk, name) for chunk in chunks], 1) for name in "qkv"]
        return [*(x.transpose(0, 1)[None] for x in heads_first), torch.cat([chunk.out for chunk in chunks])[None].contiguous()]
