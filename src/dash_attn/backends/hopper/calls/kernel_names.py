"""Names of the kernels that calls launch. A name is known without a GPU; loading it compiles what is not compiled yet."""

from __future__ import annotations

from ctypes import Structure, addressof
from dataclasses import dataclass, replace

from ....call.options import AttentionOptions
from ..driver.launch import Launch, LoadedKernel, load_kernel
from ..tiles import (
    CLUSTER_THREADS,
    DECODE_THREADS,
    HELPER_THREADS,
    THREADS,
    backward_tiles,
    cluster_tiles,
    decode_tiles,
    forward_tiles,
    threads_per_row,
)

MODIFIER_NOTE_BYTES = 16  # on dropout and ALiBi, of a tile
MODIFIER_BYTES = 2 * MODIFIER_NOTE_BYTES  # in shared memory
PACKED = "Packed"  # the mask kind of packed sequences: a band, sequence by sequence


def flag(value: bool) -> str:
    """As a template argument."""
    return "true" if value else "false"


@dataclass(frozen=True)
class KernelName:
    header: str
    name: str
    threads: int = HELPER_THREADS
    shared_bytes: int = 0

    def load(self, device: int) -> LoadedKernel:
        return load_kernel(device, self.header, self.name, self.threads, self.shared_bytes)

    def by_thread(self, device: int, count: int, params: Structure) -> Launch:
        """Of a kernel that has a thread for each of `count` things."""
        return self.load(device).prepare(-(-count // self.threads), [addressof(params)])


@dataclass(frozen=True)
class Variant:
    """What both passes choose kernels by."""

    dtype: str
    dim: int
    softcap: bool
    mask_kind: str
    dropout: bool = False
    alibi: bool = False

    @classmethod
    def of(cls, dtype: str, dim: int, options: AttentionOptions, mask_kind: str) -> Variant:
        return cls(dtype, dim, bool(options.softcap), mask_kind, bool(options.dropout_p), options.alibi)

    @property
    def modified(self) -> bool:
        return self.dropout or self.alibi

    @property
    def modifiers(self) -> str:
        return f"{flag(self.dropout)}, {flag(self.alibi)}"


def forward_kernel(variant: Variant, consumers: int, v_dim: int) -> KernelName:
    choices = f"{variant.dtype}, {variant.dim}, {consumers}, {flag(variant.softcap)}, MaskKind::{variant.mask_kind}"
    threads, shared_bytes = 128 * (consumers + 1), forward_tiles(variant.dim, consumers, v_dim).shared_bytes
    if variant.modified:
        name = f"attention_forward_modified<{choices}, {variant.modifiers}>"
        return KernelName("forward/attention.cuh", name, threads, shared_bytes + MODIFIER_BYTES)
    of_values = f", {v_dim}" if v_dim != variant.dim else ""
    return KernelName("forward/attention.cuh", f"attention_forward<{choices}{of_values}>", threads, shared_bytes)


def decode_kernel(dtype: str, dim: int, softcap: bool, columns: int = 0) -> KernelName:
    """columns: of V that a CTA of a cluster owns; 0: no clusters."""
    if columns:
        name = f"attention_decode_cluster<{dtype}, {dim}, {columns}, {flag(softcap)}>"
        return KernelName("decode/cluster.cuh", name, CLUSTER_THREADS, cluster_tiles(dim, columns).shared_bytes)
    name = f"attention_decode<{dtype}, {dim}, {flag(softcap)}>"
    return KernelName("decode/attention.cuh", name, DECODE_THREADS, decode_tiles(dim).shared_bytes)


@dataclass(frozen=True)
class BackwardKernels:
    preprocess: KernelName
    attention: KernelName
    postprocess: KernelName
    sink_gradient: KernelName
    modifier_notes: KernelName | None = None  # first, where there is dropout or ALiBi
    ending: KernelName | None = None  # between legs, where a rank walks them


def backward_kernels(variant: Variant, v_dim: int, ordered: bool, record: bool = False) -> BackwardKernels:
    """v_dim: that the kernel has for values; record: with the attention kernel that notes when every task ran."""
    dtype, packed, tiles = variant.dtype, flag(variant.mask_kind == PACKED), backward_tiles(variant.dim, v_dim)
    dims = f"{variant.dim}, {v_dim}"
    flags = f"{flag(ordered)}, {flag(variant.softcap)}"
    preprocess = f"backward_preprocess<{dtype}, {threads_per_row(v_dim)}, {tiles.q_rows}, {packed}>"
    if variant.modified:
        assert ordered, "support.py refuses others"
        name = f"attention_backward_modified<{dtype}, {dims}, {flag(variant.softcap)}, MaskKind::{variant.mask_kind}, {variant.modifiers}>"
        attention = KernelName("backward/attention.cuh", name, THREADS, tiles.shared_bytes + MODIFIER_BYTES)
    else:
        name = f"attention_backward<{dtype}, {dims}, {flags}, MaskKind::{variant.mask_kind}{', true' if record else ''}>"
        attention = KernelName("backward/attention.cuh", name, THREADS, tiles.shared_bytes)
    return BackwardKernels(
        KernelName("backward/preprocess.cuh", preprocess),
        attention,
        KernelName("backward/postprocess.cuh", f"backward_postprocess<{dtype}, {dims}, {packed}>"),
        KernelName("backward/sink_gradient.cuh", f"sink_gradient<{tiles.q_rows}, {packed}>"),
        KernelName("backward/modifier_notes.cuh", f"modifier_notes<{packed}>") if variant.modified else None,
    )


def leg_kernels(variant: Variant, v_dim: int) -> BackwardKernels:
    """Of a rank that shares sequences with others. Only what walks legs and ends trips is not of the plain backward."""
    plain = backward_kernels(variant, v_dim, ordered=True)
    flags = f"{flag(variant.softcap)}, MaskKind::{variant.mask_kind}"
    attention = f"attention_backward_of_legs<{variant.dtype}, {variant.dim}, {v_dim}, {flags}>"
    return replace(
        plain,
        attention=KernelName("backward/attention.cuh", attention, THREADS, plain.attention.shared_bytes),
        ending=KernelName("backward/ending.cuh", f"end_trips<{variant.dim}, {v_dim}>"),
    )
