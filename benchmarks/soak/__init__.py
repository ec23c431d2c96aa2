"""A long run: ``python -m benchmarks.soak`` learns from a stream for a million steps, twice.

The stream has resets of single samples, masked steps and NaN inputs. One run is undisturbed. The
other is interrupted and killed, and resumes each time from its last checkpoint. Memory must stay
constant, no program may be compiled after the start, the last tenth must be as fast as the first,
and both runs must end with equal bits.
"""
