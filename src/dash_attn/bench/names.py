"""Names of candidates that the report treats specially."""

OURS = "dash-attn"
UNORDERED = "dash-attn unordered"
CUDNN = "cuDNN"
