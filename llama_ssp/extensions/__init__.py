"""Extensions: abilities without which the package stands. Delete a folder with its tests, and everything else works.

`records` of an extension holds its records for the registries, `conf` its options; the rest is its code. The core
imports no extension, and an extension no other one but as `NEEDS` of `llama_ssp.manifest` says, which names them all.
"""
