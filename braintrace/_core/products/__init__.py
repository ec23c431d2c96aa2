"""Products of inputs and factors, and their sums in place."""
