"""The commands: plan, demo, bench, calibrate, verify, doctor. `main` finds the one that was asked for."""
