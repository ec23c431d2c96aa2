"""Train networks by every rule on the same tasks: ``python -m benchmarks.learning``.

All methods use the same initial parameters, samples, order, optimizer, learning rates and number of
updates; only the gradient differs. A run is a task, a cell and a method. Its learning rates and
seeds are lanes of one compiled program. The results are rows of one CSV file;
`docs/results.md` has the conclusions.
"""
