"""The functions people call, and how PyTorch differentiates and traces them. `functions.flash_attn_func` is the way in."""
