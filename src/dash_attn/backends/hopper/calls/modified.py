"""Dropout and ALiBi: the parameters of kernels that have them (kernels/common/modifiers.cuh)."""

from __future__ import annotations

from ctypes import addressof
from typing import Any

import torch
from torch import Tensor

from ....call.call import Modifiers
from ....call.dropout import LEVELS, threshold_of
from ....call.options import AttentionOptions
from ..driver.launch import Launch
from ..driver.parameters import ModifierNotesParams, ModifierParams, TilePlaces
from ..support import is_modified
from ..tiles import helper_blocks
from .kernel_names import KernelName
from .layout import LOG2_E, DenseLayout, PackedLayout


def modifier_params(layout: DenseLayout | PackedLayout, options: AttentionOptions, slope_factor: float) -> ModifierParams:
    """Without the addresses. slope_factor: from slopes to what the kernel counts in."""
    threshold = threshold_of(options.dropout_p) if options.dropout_p else 0
    return ModifierParams(
        first_head=options.head_offset * layout.group,
        slope_factor=slope_factor,
        threshold=threshold * LEVELS,
        rescale=LEVELS / threshold if threshold else 1.0,
    )


def point_to(params: ModifierParams, modifiers: Modifiers | None, options: AttentionOptions, group: int) -> list[Tensor]:
    """Returns what must live until the launches are made."""
    assert modifiers is not None
    params.first_head = options.head_offset * group + modifiers.first_head
    lasting = []
    if options.dropout_p:
        assert modifiers.seeds is not None
        seeds = modifiers.seeds.contiguous()
        params.seeds = seeds.data_ptr()
        lasting.append(seeds)
    if options.alibi:
        assert modifiers.slopes is not None
        slopes = modifiers.slopes.detach().to(torch.float32).contiguous()
        params.slopes, params.slope_stride = slopes.data_ptr(), slopes.shape[-1] if slopes.ndim == 2 else 0
        lasting.append(slopes)
    return lasting


class ForwardModifiers:
    """Of a forward; scores are in units of the scale, or of the cap."""

    def __init__(self, layout: DenseLayout | PackedLayout, options: AttentionOptions) -> None:
        self._options, self._group = options, layout.group
        self.params = modifier_params(layout, options, 1 / (options.softcap or options.scale))

    @staticmethod
    def of(layout: DenseLayout | PackedLayout, options: AttentionOptions) -> ForwardModifiers | None:
        return ForwardModifiers(layout, options) if is_modified(options) else None

    def point_to(self, modifiers: Modifiers | None) -> list[Tensor]:
        return point_to(self.params, modifiers, self._options, self._group)


class BackwardModifiers:
    """Of a backward; exponents are of 2. A kernel first writes a note for each dQ tile, which the loader brings with Q."""

    def __init__(self, layout: DenseLayout | PackedLayout, options: AttentionOptions, kernel: KernelName, dq_tiles: int) -> None:
        self._options, self._group = options, layout.group
        self.params = modifier_params(layout, options, LOG2_E)
        self.before = ModifierNotesParams(kv_len=layout.kv_len)
        self._launch: Launch = kernel.load(layout.device).prepare(helper_blocks(dq_tiles), [addressof(self.before)])

    def launch(self, modifiers: Modifiers | None, places: TilePlaces, notes: int, stream: Any) -> list[Tensor]:
        """Behind what plans on the device. Returns what must live until the launches are made."""
        lasting = point_to(self.params, modifiers, self._options, self._group)
        self.params.notes = notes
        self.before.modifiers, self.before.tiles, self.before.notes = self.params, places, notes
        self._launch.on(stream)
        return lasting
