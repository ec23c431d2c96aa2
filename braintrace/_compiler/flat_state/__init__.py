"""All hidden state of a sample as one vector, for full-Jacobian rules."""
