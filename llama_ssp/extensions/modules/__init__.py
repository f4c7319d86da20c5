"""The modules of transformers, cut and filled by us: families that the lean decoder does not run."""
