"""Which rule learns what, at what price: ``python -m benchmarks learning`` trains networks.

A run is a task, a cell and a way to learn. All learning rates and seeds of a run are lanes of one
compiled program, so that they share its compilation and its products. Every run leaves one record;
a record that is there, with the settings that are asked for, is not made again.

All ways start from the same parameters, see the same samples in the same order, and go down their
gradients by the same optimizer over the same grid of rates, with as many updates. What differs is
the gradient alone.
"""
