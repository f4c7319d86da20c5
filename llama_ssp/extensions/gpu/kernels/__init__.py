"""The kernels in Triton, a file each; nothing here chooses."""
