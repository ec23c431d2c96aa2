"""`LearnerState`, and the parts of it."""
