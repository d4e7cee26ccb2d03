"""Runs a plan's chains on the CPU under the rules of the kernel's semaphores, in any interleaving: no torch."""
