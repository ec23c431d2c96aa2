"""The steps of a chunk: loops, then losses, whose derivatives may pass back through the loops."""
