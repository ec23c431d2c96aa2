"""Learner: gradients, online updates and prediction over sequences, compiled once per shape."""
