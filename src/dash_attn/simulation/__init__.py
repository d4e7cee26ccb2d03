"""How long a schedule takes on a machine, and how long any schedule must: numpy, no torch."""
