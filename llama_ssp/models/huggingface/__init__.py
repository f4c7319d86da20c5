"""The library's own modules, and the backends that place them."""
