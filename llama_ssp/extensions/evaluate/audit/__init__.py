"""`task=audit`: tests whether a server's texts have the target's law, with the sums of `suite=distribution`."""
