"""Products with sparse matrices: pattern, forms, and the ETP operation."""
