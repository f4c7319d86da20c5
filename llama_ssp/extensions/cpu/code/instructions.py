"""The instructions of this machine's processor, by LLVM's names; imports no torch."""

from functools import cache


@cache
def has_features(names: tuple[str, ...]) -> bool:
    """Whether this CPU has instructions, and llvmlite, which asks it, is there.

    The names are x86's and ask nothing of other CPUs.
    """
    try:
        from llvmlite import binding
    except ModuleNotFoundError:
        return False
    found = binding.get_host_cpu_features()
    return not names or all(found.get(name, False) for name in names)
