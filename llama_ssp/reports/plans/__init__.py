"""Tables of plans that compare machines."""
