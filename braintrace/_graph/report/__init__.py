"""Report of a compiled model: its rows, and their printed form."""
