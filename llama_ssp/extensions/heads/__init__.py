"""Draft heads: EAGLE-3, P-EAGLE, DFlash, DSpark, and the MTP layers of a target (`draft=mtp`)."""
