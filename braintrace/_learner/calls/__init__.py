"""Parts of a call: its request, options, chunks and resets, and its compiled program."""
