"""Writes, compiles and keeps operators of torch for this CPU, by LLVM, in the first run on a machine.

Knows neither models nor sampling. Whoever has a use for an operator defines it, checks it, and goes on without it:
`models.native` and `sampling.compiled_draw`.
"""
