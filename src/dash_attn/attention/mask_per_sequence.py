"""Packed sequences of which each has a mask of its own, for example a boolean matrix: calls of their own, one after the other."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.call import Given
from ..call.offsets import Packed, SequenceOffsets
from ..call.options import Choices, options_for, refuse_given_schedule
from ..call.tensor_checks import check_sinks, check_tensors
from .functions import new_attention


def attention_of_each(tensors: tuple[Tensor, Tensor, Tensor], given: Given, choices: Choices, packed: Packed) -> tuple[Tensor, Tensor]:
    """Output and LSE. choices.mask: the masks. The host reads the offsets, as it reads the masks."""
    if torch.compiler.is_compiling():
        raise TypeError("a compiled program cannot take masks of packed sequences, whose lengths the host reads: leave this call out of it")
    masks, (q, k, v) = choices.mask, tensors
    check_tensors(q, k, v, ndim=3)
    check_sinks(given.sinks, q)
    refuse_given_schedule(options_for(choices._replace(mask=None), q.shape[-1]))
    offsets = SequenceOffsets(*packed)
    offsets.check_device(q.device)
    sequences = offsets.on(torch.device("cpu")).sequences(len(q), len(k))
    if len(masks) != len(sequences):
        raise ValueError(f"masks of packed sequences must be one for each of the {len(sequences)} sequences; got {len(masks)}")
    given = given.drawn(q, len(sequences), choices.dropout_p)
    # So that the gradient of the sinks is one sum over the sequences.
    sinks = [None] * len(masks) if given.sinks is None else given.sinks.expand(len(masks), -1).unbind()
    results = []
    for number, (rows, columns) in enumerate(sequences):
        own = given.modifiers and given.modifiers.of_sequences(slice(number, number + 1))
        one = Given(sinks[number], own and own.seeds, own and own.slopes)
        out, lse = new_attention(q[None, rows], k[None, columns], v[None, columns], one, choices._replace(mask=masks[number]), None)
        results.append((out[0], lse[0]))
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results], dim=-1)


def are_masks(mask: Any) -> bool:
    return isinstance(mask, Sequence) and not isinstance(mask, str)
