"""Operators that no library has fast enough, one file each: torch's version, which is the reference, and our own.

    operator     reference                              compiled for this CPU
    linear       products of torch, oneDNN and FBGEMM   `cpu.linear`: packed weights, a few rows
    attention    `attention.by_torch`                   `cpu.attention`: the cache by each row's own length
    layer        an operator for each part              `cpu.layer`: whole layers for a few tokens
    draw         `sampling.processors`                  `cpu.draw`: the draw of a token

`cpu.operators.find_operator` decides: this CPU has the instructions, llvmlite is there, and the operator computes what
its reference computes on a small case; otherwise the run goes on with the reference, and one sentence says so.

What a GPU has instead is in `operators`.

The kernels are our own because no library was fast with rows that do not depend on each other: `docs/findings/cpus.md`.
"""
