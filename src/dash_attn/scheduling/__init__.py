"""Which tile is computed when, and in which order sums are added: numpy, no torch.

mask + shape -> Problem -> generator -> Schedule (order + placement, proven) -> Plan (int32 tables).
"""
