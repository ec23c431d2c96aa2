"""Facts about one step that the passes of the compiler share."""
