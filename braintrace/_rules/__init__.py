"""Learning rules: how a trace advances, and its part of the gradient."""
