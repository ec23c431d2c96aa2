"""The States of a model: search, initial values, changes by other code, derivatives."""
