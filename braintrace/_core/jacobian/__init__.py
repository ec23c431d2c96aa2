"""Jacobians of a step: per element, through maxima."""
