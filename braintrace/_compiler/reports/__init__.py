"""What a model is checked for, and what is reported about it."""
