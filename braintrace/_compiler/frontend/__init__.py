"""Trace a model into one flat program of its step."""
