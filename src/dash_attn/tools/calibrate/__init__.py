"""The constants of a machine, from measured times: what the simulator needs to predict them. `dash-attn calibrate`."""
