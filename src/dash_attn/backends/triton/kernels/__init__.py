"""The kernels, in Triton. Importing a module of this folder needs Triton; what calls them does not.

Strides come in units of eight numbers, so that the compiler knows how rows are aligned whatever their number: a kernel is compiled
once for all lengths, batches and strides. What is one rounding and what is two is written out (`tl.fma`), because the compiler is
told not to fuse products and sums. Helpers return once, at their end: what stands behind a return is compiled, too.
"""
