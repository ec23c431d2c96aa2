"""Products of inputs and factors: safe for NaN, and added to traces in place."""
