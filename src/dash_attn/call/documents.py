"""Documents in a row are packed sequences: each has the bits it has alone, and nothing of its neighbours reaches it, not even a
NaN. Only a schedule that is asked for by name needs the whole mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..masks import Causal, Documents, Full
from .modifiers import Modifiers
from .offsets import SequenceOffsets
from .options import AttentionOptions

Upload = Callable[[NDArray[Any], torch.device], Tensor]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


def runs_packed(options: AttentionOptions) -> bool:
    return isinstance(options.mask, Documents) and options.schedule == "auto"


@lru_cache(maxsize=64)
def of_a_document(options: AttentionOptions) -> AttentionOptions:
    """The options of one document alone."""
    assert isinstance(options.mask, Documents)
    return replace(options, mask=Causal() if options.mask.causal else Full())


def document_ends(lengths: tuple[int, ...], batch: int) -> NDArray[np.int32]:
    """Where the documents of all sequences begin and end, laid end to end."""
    return np.array([0, *accumulate(lengths * batch)], dtype=np.int32)


def offsets_of_documents(lengths: tuple[int, ...], batch: int, device: torch.device, upload: Upload | None = None) -> SequenceOffsets:
    """Of all sequences. upload: to a GPU, where something may have to be seen to."""
    on_host = document_ends(lengths, batch)
    ends = torch.from_numpy(on_host).to(device) if upload is None else upload(on_host, device)
    # Room for a longer document changes no bit, but other lengths then find the same prepared call.
    longest = min(sum(lengths), 1 << (max(lengths) - 1).bit_length())
    return SequenceOffsets(ends, ends, longest, longest)


def laid_end_to_end(x: Tensor) -> Tensor:
    """(batch x length, heads, head dim): a view where the sequences follow each other in memory, else a copy."""
    return x.flatten(0, 1)


def forward_of_documents(
    forward: Callable[..., tuple[Tensor, Tensor]],
    tensors: tuple[Tensor, Tensor, Tensor],
    options: AttentionOptions,
    offsets: SequenceOffsets,
    sinks: Tensor | None,
    modifiers: Modifiers | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and LSE of dense tensors, by a backend's forward of packed ones."""
    batch, length, heads, _ = tensors[0].shape
    out, lse = forward(*map(laid_end_to_end, tensors), of_a_document(options), offsets, sinks, *_of_documents(modifiers, options))
    return out.unflatten(0, (batch, length)), lse.view(heads, batch, length).transpose(0, 1).contiguous()


def backward_of_documents(
    backward: Callable[..., Gradients],
    tensors: tuple[Tensor, ...],
    rows: tuple[Tensor, Tensor | None],
    options: AttentionOptions,
    offsets: SequenceOffsets,
    sinks: Tensor | None,
    modifiers: Modifiers | None = None,
) -> Gradients:
    """Gradients of dense tensors (dout, q, k, v, out), by a backend's backward of packed ones. rows: LSE and its gradient."""
    lse, dlse = (None if x is None else x.transpose(0, 1).flatten(1) for x in rows)
    more = sinks, dlse, *_of_documents(modifiers, options)
    dq, dk, dv, dsinks = backward(*map(laid_end_to_end, tensors), lse, of_a_document(options), offsets, *more)
    shape: Any = tensors[1].shape[:2]
    return dq.unflatten(0, shape), dk.unflatten(0, shape), dv.unflatten(0, shape), dsinks


def _of_documents(modifiers: Modifiers | None, options: AttentionOptions) -> tuple[Modifiers, ...]:
    """The last argument of a backend, where there is one."""
    assert isinstance(options.mask, Documents)
    return () if modifiers is None else (modifiers.of_documents(len(options.mask.lengths)),)
