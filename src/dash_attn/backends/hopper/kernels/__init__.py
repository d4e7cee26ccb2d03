"""CUDA C++ compiled by NVRTC. `device.compile` hands every file to it under its room and name."""
