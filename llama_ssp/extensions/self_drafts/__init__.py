"""The target as its own draft (`draft=self`): some of its layers, or the beginning and the end of its cache."""
