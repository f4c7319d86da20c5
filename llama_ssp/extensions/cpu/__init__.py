"""All that only CPUs need: compiled operators, tracing, the number of threads, and sums through shared memory.

    linear      weights in blocks, a few rows                     `code.linear` writes the operator
    attention   the cache by each row's own length                `code.attention`
    latents     the cache of DeepSeek's kind, as it is kept       `code.latents`
    layer       whole layers for a few tokens                     `code.layer`
    decoder     how the lean decoder uses attention and layers
    draw        the draw of a token                               `code.draw`
    executor    the stages of a round, replayed as traces         `tracing`
    sums        collectives that a trace holds                    `shared_memory` has small messages
    threads     the number of threads

`operators.find_operator` uses an operator if this CPU has the instructions, llvmlite (the extra `cpu`) is installed,
and the operator computes what its reference computes on a small case; otherwise the run uses the reference, and one
sentence says so. The operators are our own because no library was fast with rows that do not depend on each other:
`docs/findings/cpus.md`.
"""
