"""The functions people call, and how PyTorch differentiates and traces them."""
