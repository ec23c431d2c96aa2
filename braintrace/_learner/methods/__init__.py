"""One body for each method of a learner."""
