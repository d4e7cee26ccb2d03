"""What is prepared once per kind of call, and how it is launched.

A call, top to bottom: `forward` or `backward` look up a prepared call by its `layout`: a ForwardCall or BackwardCall. It is built from
its setup (ForwardSetup in `forward`, BackwardSetup in `backward_setup`: what shapes and options decide; `explain` also asks it), from
`tables` on the device or, of packed sequences, from the kernels in `packed` that make them there, and from kernels by name
(`kernel_names`); its `run` launches.

Ranks that share a sequence, and a backward on too few SMs, come through `rank_backward`, whose tables are made and kept in `leg_tables`.
"""
