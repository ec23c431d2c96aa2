"""What a call of a method needs: options, chunks, compiled programs."""
