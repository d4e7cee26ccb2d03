"""One sequence on several ranks, with the bits of one."""
