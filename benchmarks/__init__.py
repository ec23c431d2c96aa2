"""Benchmarks: ``python -m benchmarks`` measures the library on the machine at hand.

`questions` holds one file a question. Every case of it runs in a process of its own, compares the
functions that it times with an oracle, and says which targets it holds. The models, oracles and
hand-written baselines use nothing of the library but its public operations.

`learning` trains networks instead: ``python -m benchmarks learning``.
"""
