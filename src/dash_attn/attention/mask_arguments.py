"""A mask as one word and a list of whole numbers, and back: the form in which it is an argument of a torch operator."""

from __future__ import annotations

from ..masks.encoding import decode_mask, encode_mask

BY_TENSOR = "tensor"  # a boolean matrix is a tensor argument of its own

__all__ = ["BY_TENSOR", "decode_mask", "encode_mask"]
