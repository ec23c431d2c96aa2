"""The steps of a chunk: loops, then losses, then the reverse pass."""
