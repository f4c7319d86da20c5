"""`python -m llama_ssp`: the program `llama-ssp`."""

from llama_ssp.run.commands.program import main

if __name__ == "__main__":
    main()
