"""Names of candidates that the report treats specially."""

OURS = "dash-attn"
UNORDERED = "dash-attn unordered"
EQUAL_HEADS = "dash-attn equal heads"
CUDNN = "cuDNN"


def is_ours(candidate: str) -> bool:
    """Ours, with or without an order, with equal heads, and each of our schedules."""
    return candidate.startswith(OURS)
