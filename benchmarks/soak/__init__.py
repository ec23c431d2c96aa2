"""A long run: ``python -m benchmarks.soak`` learns from a stream for a million steps, twice.

The stream has what streams have: samples that begin anew, steps that do not count, inputs that are
not numbers. One run is left alone. Another one is interrupted, killed, and goes on each time from
what it has saved. Memory is to stay as it is, nothing is to be compiled after the start, the last
tenth is to be as fast as the first, and both runs are to end with the same learner, to the bit.
"""
