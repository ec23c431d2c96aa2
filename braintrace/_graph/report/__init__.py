"""The report of a compiled model: its rows, and how they are printed."""
