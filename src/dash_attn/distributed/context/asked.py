"""What a rank was asked for, checked by itself, and what must be the same on every rank."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from ...backends import resolve
from ...call.call import Given
from ...call.options import AttentionOptions, Choices, in_words, is_zero, options_for
from ...call.planning import hash_of
from ...call.tensor_checks import check_sinks, check_tensors
from ...masks import Mask
from ...masks.encoding import mask_to_json
from ...scheduling.ranks.sharding import CutTile, Sharding
from ..hosts import NAMES, Facts
from .rows import Offsets, documents_in, sharding_of_rank
from .shared_call import Lengths, SharedCall
from .ulysses import check_factor, outer_sharding


def _in_words(x: Tensor | None) -> str:
    """On a GPU the host does not look at values now (LateValues)."""
    if x is None:
        return "none"
    return f"{x.tolist()} ({x.dtype})" if x.device.type == "cpu" else f"{tuple(x.shape)} ({x.dtype})"


class Asked(NamedTuple):
    """Of one rank: its tensors, and the choices that all ranks have alike."""

    q: Tensor
    k: Tensor
    v: Tensor
    given: Given
    choices: Choices
    sharding: str | Sharding
    ulysses: int = 1
    cu_seqlens: Offsets | None = None

    @classmethod
    def by_name(cls, arguments: Mapping[str, Any]) -> Asked:
        """Of the arguments of context_parallel_attention."""
        chosen, given, own = ({name: arguments[name] for name in kind._fields if name in arguments} for kind in (Choices, Given, cls))
        return cls(given=Given(**given), choices=Choices(**chosen, alibi=arguments["alibi_slopes"] is not None), **own)

    def checked(self, ranks: int, rank: int | None) -> tuple[AttentionOptions, Sharding]:
        """Raises where the tensors do not fit. rank: None where they are those of some rank, nobody knows of which."""
        q, k, v = self[:3]
        check_tensors(q, k, v)
        check_sinks(self.given.sinks, q)
        dropout_p = self.choices.dropout_p
        if self.given.dropout_seed is None and not is_zero(dropout_p):
            raise ValueError(
                "ranks that share a sequence must drop the same pairs, but each has a generator of its own: give dropout_seed, the same"
                f" {q.shape[0]} numbers of torch.int64 on every rank; got dropout_p={dropout_p!r} and no dropout_seed"
            )
        self.given.check(q, q.shape[0])
        options, sharding = options_for(self.choices, q.shape[-1]), sharding_of_rank(self.sharding, q.shape[1], ranks)
        who, some = ("a rank of this sharding", range(ranks)) if rank is None else (f"rank {rank}", range(rank, rank + 1))
        fitting = sorted({len(sharding.rows_of(one)) for one in some})
        if q.shape[1] != k.shape[1] or q.shape[1] not in fitting:
            raise ValueError(
                f"{who} has {' or '.join(map(str, fitting))} of the {sharding.rows} rows, queries and keys alike; got {q.shape[1]} queries"
                f" and {k.shape[1]} keys"
            )
        check_factor(self.ulysses, ranks, k.shape[2])
        return options, sharding

    def part(self, ranks: int, rank: int, differentiable: bool) -> tuple[Part, Facts]:
        """What a rank finds out by itself, and what must be the same on every rank. Sends no message."""
        options, sharding = self.checked(ranks, rank)
        part = Part.of(self, options, sharding, rank)
        facts: Facts = {name: getattr(options, name) for name in ("softcap", "accumulation", "head_offset", "dropout_p")}
        facts |= {"softmax_scale": options.scale, "backend": resolve(options.backend, self.q.device), "the dtype": self.q.dtype}
        facts |= {"mask": _with_hash(options.mask), "schedule": _with_hash(options.schedule), "the batch size": self.q.shape[0]}
        facts |= {"the numbers of heads": (self.q.shape[2], self.k.shape[2]), "the head dims": (self.q.shape[3], self.v.shape[3])}
        facts |= {"sharding": sharding, "ulysses": self.ulysses, "cu_seqlens": part.documents}
        facts |= {name: _in_words(x) for name, x in zip(NAMES, self.given, strict=True)}
        code = None if part.call is None else part.call.backend.machine_code()
        return part, facts | {"whether gradients are needed": differentiable, "the machine code": code}


@dataclass(frozen=True)
class Part:
    """What is known before the others agree. options: those of its own heads. call: what the ranks
    outside share; None where there is no other, or no sequence. documents: lengths of those in the row, if it has any."""

    options: AttentionOptions
    call: SharedCall | None
    documents: Lengths | None
    sharding: Sharding

    @classmethod
    def of(cls, asked: Asked, options: AttentionOptions, sharding: Sharding, rank: int, backend: str | None = None) -> Part:
        """backend: that of the tensors, unless it is named because they stand for others."""
        (q, k, v), ulysses, cu_seqlens = asked[:3], asked.ulysses, asked.cu_seqlens
        own = replace(options, head_offset=options.head_offset + rank % ulysses * (k.shape[2] // ulysses))
        alone, documents = documents_in(own, cu_seqlens, sharding.rows)
        outer = outer_sharding(sharding, ulysses)
        if (outer.ranks == 1 and cu_seqlens is None) or len(q) == 0:
            documents = None  # backends know masks of documents, and batches of nothing
        own = own if documents is None else alone
        try:
            call = SharedCall.of((q, k, v), own, outer, documents, ulysses, backend) if outer.ranks > 1 and len(q) else None
        except CutTile as error:  # it speaks of outer chunks: with Ulysses, as many of the rank's own are one
            raise ValueError(f"{error.words}. {sharding.that_fit(error.unit // math.gcd(error.unit, ulysses))}") from error
        return cls(own, call, documents, sharding)


@lru_cache(maxsize=128)
def _with_hash(choice: Mask | str) -> str:
    """A mask or a schedule in words, with a hash, because these leave out the blocks of a mask and the walks of a schedule."""
    words, text = (in_words(choice), choice) if isinstance(choice, str) else (str(choice), json.dumps(mask_to_json(choice)))
    return f"{words} ({hash_of(text)})"
