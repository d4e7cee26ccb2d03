"""What is prepared once per kind of call, and how it is launched.

A call, top to bottom: `documents` (documents run as packed sequences) -> `forward` or `backward`, which look up a prepared call by
its `layout` -> DenseForward, PackedForward, DenseBackward or PackedBackward. A call is built from its setup (`forward_setup`,
`backward_setup`: what shapes and options decide; `explain` also asks it), from `tables` on the device or, of packed sequences, from
the kernels in `packed` that make them there, and from kernels by name (`kernel_names`); its `run` launches.

Ranks that share a sequence come through `rank_forward` and `rank_backward`, whose tables are made in `leg_tables` and kept by
`legs_on_device`.
"""
