"""One order on several devices: context parallelism is a placement.

sharding.py deals the rows of a sequence to devices, trips.py cuts the walks of an order where a row's device changes, units.py
puts what a device runs at once into one global sequence that cannot hang. in_legs.py cuts the walks of one device, which then needs
no gang.
"""
