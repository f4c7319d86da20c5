"""The library for notebooks: load a pair of models, complete prompts, plan runs, without configuration files.

`llama_ssp` imports its names on first use, so that `plan` works without torch.
"""
