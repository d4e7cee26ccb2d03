"""Benchmarks on a GPU: ours beside other attention kernels, interleaved in one process, each checked before it is timed."""
