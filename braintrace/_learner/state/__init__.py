"""`LearnerState` and its parts: optimizer, checks of finite values, units."""
