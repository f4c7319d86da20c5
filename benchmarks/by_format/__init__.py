"""Ours, llama.cpp and OpenVINO GenAI by number format, in turns: what `benchmarks.peers --peers` measures."""
