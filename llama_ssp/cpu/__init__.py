"""All that only CPUs need: compiled operators, tracing, the number of threads, and sums through shared memory.

Three places choose, and everything else goes through them:

    part                     chosen by                        instead
    an operator              `operators.find_operator`        torch's operators, see `kernels`
    how stages are run       `speculate.engine.executors`     `tracing`, else Python
    how ranks sum            `ranks.comms`                    `sums` through `shared_memory`, else gloo
    the number of threads    `run.decoders`                   `threads`, else torch's own

Operators are written with llvmlite, the extra `cpu`. Without it everything runs, slower.
"""
