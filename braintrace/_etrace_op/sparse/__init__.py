"""Products with sparse matrices: pattern, forms of the product, and the ETP operation."""
