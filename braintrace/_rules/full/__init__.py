"""Traces of rules that read the whole state of a sample."""
