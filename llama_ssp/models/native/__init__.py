"""Kernels for CPUs, which llvmlite compiles when a model is first loaded on a machine: no compiler is needed."""
