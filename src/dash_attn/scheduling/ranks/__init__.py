"""One order on several ranks: context parallelism is a placement.

sharding.py deals the rows of a sequence to ranks, units.py cuts the walks of an order where a row's rank changes, share.py
puts what a rank runs at once into one global sequence that cannot hang. It also cuts the walks of one rank, which then needs
no gang.
"""
