"""`task=audit`: has a server's text the target's law? The sums of `suite=distribution` judge it."""
