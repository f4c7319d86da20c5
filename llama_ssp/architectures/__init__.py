"""What is known of model families without torch: shapes, parameters, slices."""
