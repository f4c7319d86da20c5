"""The program `llama-ssp`: its commands, their command lines, and the start of ranks. Errors become exit codes here."""
