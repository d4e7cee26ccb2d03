// Instead of the kernels' own, which is all PTX.
#pragma once
#include "common/shared_with_python.cuh"
inline void report_and_trap(volatile int*, Trouble, int, int, int) { abort(); }
