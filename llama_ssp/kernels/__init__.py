"""Operators of models in torch, which are the reference, one file each.

Module `operators` has the operators that extensions or plugins use in their place on a device, compared with these.
"""
