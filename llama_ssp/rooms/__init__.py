"""Rooms: abilities that the package stands without. Delete a room's folder and its tests, and everything else works.

`records` of a room holds its records for the registries, `conf` its options; the rest is its code. The core imports no
room, and a room no other one but as `NEEDS` of `llama_ssp.manifest` says, which names them all.
"""
