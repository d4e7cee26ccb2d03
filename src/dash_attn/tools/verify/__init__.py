"""Tests the determinism contract on this machine and writes down what was tested: `dash-attn verify`."""
