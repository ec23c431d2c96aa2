"""Mutants that no test can notice, since nothing that is promised changes: why, by name."""

EQUIVALENT: dict[str, str] = {}
