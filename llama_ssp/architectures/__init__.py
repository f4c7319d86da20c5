"""Model families without torch: parameters, shapes and their slices per rank."""
