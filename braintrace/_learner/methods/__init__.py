"""The pure function (body) of each method of a learner: gradient, online, evolve."""
