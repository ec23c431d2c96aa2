"""The States of a model: found, initialised, grouped."""
