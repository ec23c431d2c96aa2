"""Groups of hidden states and the operations that reach them elementwise."""
