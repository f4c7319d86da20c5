"""Kernels of GPUs, written in Triton, and the code that tries each of them on its device before its first use.

    kernels       what is computed                                          tried by
    between       norms, rotary embedding and cache, gate                   `between`
    linear        a few rows by weights of 8 or 4 bits                      `linear`
    halves        a few rows by weights in 16 bits                          `linear`
    attention     the queries of a round                                    `attention`
    latents       attention to latents                                      `latents`
    equal_parts   all queries, in one order of sums                         `one_order`
    recurrence    a few tokens of a recurrent layer                         `recurrence`
    draw          probabilities, and the draw of a token                    `draw`
    sums          sums over the GPUs of a node, with residual and norm      `sums`

The kernels are our own because no library was fast with rows that do not depend on each other.
"""
