"""A folder for sys.path with Hydra's namespace package `hydra_plugins`, which has no `__init__`."""
