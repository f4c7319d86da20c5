"""Storage formats of weights, and their kernels."""
