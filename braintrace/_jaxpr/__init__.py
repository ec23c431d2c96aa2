"""Tools for any jaxpr, independent of models and eligibility traces."""
