"""Operators of models in torch, which are the reference, one file each.

What a device has in their place is in `operators`: an extension's or a plugin's, tried against these.
"""
