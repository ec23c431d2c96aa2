"""Automatic marking: find the weights of a model and bind ETP operations."""
