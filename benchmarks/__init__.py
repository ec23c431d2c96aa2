"""Benchmarks: ``python -m benchmarks`` measures the library on the machine at hand.

`questions` has one file for each question. Every case runs in a process of its own, and reports
which targets hold. Models and hand-written baselines use only public operations of the library; the
tests compare their gradients with oracles. See ``README.md`` for all commands.
"""
