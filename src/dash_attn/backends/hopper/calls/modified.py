"""Dropout and ALiBi: the parameters of kernels that have them (kernels/common/modifiers.cuh)."""

from typing import Any

import torch
from torch import Tensor

from ....call.call import Modifiers
from ....call.dropout import LEVELS, threshold_of
from ....call.options import LOG2_E, AttentionOptions
from ..driver.parameters import ModifierNotesParams, ModifierParams, TilePlaces
from .kernel_names import KernelName
from .layout import Layout


class ForwardModifiers:
    """Scores are in units of the scale, or of the cap."""

    def __init__(self, layout: Layout, options: AttentionOptions) -> None:
        self._options, self._first_head = options, options.head_offset * layout.group
        threshold = threshold_of(options.dropout_p) if options.dropout_p else 0
        self.params = ModifierParams(
            first_head=self._first_head,
            slope_factor=1 / (options.softcap or options.scale),
            threshold=threshold * LEVELS,
            rescale=LEVELS / threshold if threshold else 1.0,
        )

    def point_to(self, modifiers: Modifiers | None) -> list[Tensor]:
        """Returns what must live until the launches are made."""
        assert modifiers is not None
        params, lasting = self.params, []
        params.first_head = self._first_head + modifiers.first_head
        if self._options.dropout_p:
            assert modifiers.seeds is not None
            seeds = modifiers.seeds.contiguous()
            params.seeds = seeds.data_ptr()
            lasting.append(seeds)
        if self._options.alibi:
            assert modifiers.slopes is not None
            slopes = modifiers.slopes.detach().to(torch.float32).contiguous()
            params.slopes, params.slope_stride = slopes.data_ptr(), slopes.shape[-1] if slopes.ndim == 2 else 0
            lasting.append(slopes)
        return lasting


class BackwardModifiers(ForwardModifiers):
    """Exponents are of 2. A kernel first writes a note for each dQ tile, which the loader brings with Q."""

    def __init__(self, layout: Layout, options: AttentionOptions, kernel: KernelName, dq_tiles: int) -> None:
        super().__init__(layout, options)
        self.params.slope_factor = LOG2_E
        self.before = ModifierNotesParams(kv_len=layout.kv_len)
        self._launch = kernel.by_thread(layout.device, dq_tiles, self.before)

    def launch(self, modifiers: Modifiers | None, places: TilePlaces, notes: int, stream: Any) -> list[Tensor]:
        """Behind what plans on the device. Returns what must live until the launches are made."""
        lasting = self.point_to(modifiers)
        self.params.notes = notes
        self.before.modifiers, self.before.tiles, self.before.notes = self.params, places, notes
        self._launch.on(stream)
        return lasting
