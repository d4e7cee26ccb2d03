"""The GPU: compiling, loading and launching kernels, their parameters and memory."""
