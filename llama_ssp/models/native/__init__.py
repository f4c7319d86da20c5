"""Kernels for CPUs, which llvmlite compiles when a model is loaded: no compiler is needed, and nothing is stored."""
