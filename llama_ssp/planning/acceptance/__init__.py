"""How many drafted tokens a target accepts: measured, published, or forecast with a range."""
