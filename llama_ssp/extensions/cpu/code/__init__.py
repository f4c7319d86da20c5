"""The code of compiled operators, written with llvmlite, a file each."""
