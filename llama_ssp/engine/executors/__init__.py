"""How a round is run: from Python, as CUDA graphs, or traced for the CPU."""
