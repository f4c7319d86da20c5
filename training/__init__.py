"""Training of the shipped pair `tiny` and `tiny-draft`: data, models, recipe, measurement.

Nothing in the runner imports this package; it needs the repository and a CPU only.
"""
