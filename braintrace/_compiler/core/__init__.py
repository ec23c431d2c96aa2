"""Groups of hidden states and the operations that reach them element by element."""
