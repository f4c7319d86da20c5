"""Storage formats, one module each: layouts in files, bytes, cost, and by name the reader and the kernel.

`formats` has the kinds of records and their registry, `stored` finds the format of a checkpoint, `tools` what the tools
that write checkpoints share. Nothing here imports torch.
"""
