"""Layers by the operators of `cpu_kernels`, where this machine has them and they compute what torch's compute."""
