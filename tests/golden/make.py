"""Compute the golden gradients and compare them with the stored ones, or store them.

    PYTHONPATH=CHECKOUT python tests/golden/make.py           # compare; status 1 if a row differs
    PYTHONPATH=CHECKOUT python tests/golden/make.py --write   # store; inputs that are there stay

The library is that of the checkout on PYTHONPATH, the models and rows are those next to this file.
"""

import argparse
import json
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import jax
import numpy as np

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import braintrace
from golden import plain
from golden.nets import NETS
from golden.paths import Runs
from golden.table import RULES, STEPWISE, paths_of

TOLERANCE = 1e-10
"""Of each parameter, relative to its largest entry. All sums are of a few hundred terms in float64:
another order of them moves 1e-14, amplified by seven steps to less than 1e-12, and a term that is
left out or counted twice moves at least 1e-6."""

SAME = 1e-12
"""Rows that agree to this are stored once."""


def deviations(found, expected):
    """{parameter: (largest difference, the same over the largest entry)}."""
    scale = max((np.abs(leaf).max() for leaf in expected.values()), default=0.0) or 1.0
    result = {}
    for name, leaf in expected.items():
        off = float(np.abs(found[name] - leaf).max())
        result[name] = off, off / (float(np.abs(leaf).max()) or scale)
    return result


def differing(found, expected, tolerance=TOLERANCE):
    """The deviations above a tolerance; NaN is one."""
    if found.keys() != expected.keys():
        both = sorted(found.keys() ^ expected.keys())
        return dict.fromkeys(both, (np.inf, np.inf))
    off = deviations(found, expected)
    return {name: both for name, both in off.items() if not both[1] <= tolerance}


def result_of(make):
    """What a call returns, or the name of the error of the library by which it refuses."""
    try:
        return make()
    except braintrace.BraintraceError as error:
        return type(error).__name__


def results(net, rule, paths):
    """{path: {parameter: array}, or the name of an error}."""
    runs = result_of(lambda: Runs(net, rule))
    if isinstance(runs, str):
        return dict.fromkeys(paths, runs)
    return {path: result_of(lambda path=path: runs.of(path)) for path in paths}


def expected_of(net, rule, path):
    """What is stored: {parameter: array}, or the name of an error."""
    number = NETS[net].rows[rule][path]
    return number if isinstance(number, str) else as_dict(NETS[net], number)


def as_dict(net, number):
    """A row of the stored values by parameter."""
    shapes = dict(sorted(net.shapes.items()))
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])
    parts = np.split(net.stored["values"][number], ends[:-1])
    return {n: part.reshape(s) for (n, s), part in zip(shapes.items(), parts, strict=True)}


def exact(net, rule, path):
    """The gradient in plain JAX, where a rule has to give it; else None."""
    given = {
        "masked": path in ("mask", "mask and reset"),
        "resets": path in ("reset", "mask and reset"),
    }
    if path in STEPWISE or RULES[rule].loss != "squared":
        return None
    if rule == "immediate":
        return plain.bptt(NETS[net], window=1, **given)
    if rule == "immediate, windows":
        size = {"chunks of 1": 1, "own gradient": 1, "chunks of 7": None}.get(path, 3)
        return None if path == "two calls" else plain.bptt(NETS[net], window=size, **given)
    is_whole = RULES[rule].is_windowed and path == "chunks of 7"
    if is_whole or rule.removesuffix(", windows") in NETS[net].exact:
        return plain.bptt(NETS[net], **given)
    return None


def store(net, found):
    """Write a file; equal rows are there once. Rules that were not run stay as they are."""
    values, rows = [], {}
    if net.file.exists():
        stored = {rule: [*paths] for rule, paths in net.rows.items() if rule not in found}
        kept = {
            rule: {path: expected_of(net.name, rule, path) for path in paths}
            for rule, paths in stored.items()
        }
        found = {rule: (kept | found)[rule] for rule in RULES}
    for rule, paths in found.items():
        rows[rule] = {}
        for path, result in paths.items():
            if isinstance(result, str):
                rows[rule][path] = result
                continue
            row = np.concatenate([np.ravel(result[name]) for name in sorted(net.shapes)])
            if not np.all(np.isfinite(row)):
                raise ValueError(f"{net.name}, {rule}, {path}: not finite")
            limit = SAME * np.abs(row).max()
            same = (i for i, value in enumerate(values) if np.abs(value - row).max() <= limit)
            rows[rule][path] = next(same, len(values))
            if rows[rule][path] == len(values):
                values.append(row)
    arrays = {**net.inputs, "values": np.stack(values), "rows": np.array(json.dumps(rows))}
    np.savez_compressed(net.file, **arrays)
    print(f"{net.file.name}: {len(values)} gradients, {net.file.stat().st_size} bytes")


def compare(net, rule, path, found, expected):
    """Print what differs, a line each; return whether anything does."""
    where = f"{net:14} {rule:24} {path:16}"
    if isinstance(found, str) or isinstance(expected, str):
        if found != expected or type(found) is not type(expected):
            kinds = [v if isinstance(v, str) else "numbers" for v in (found, expected)]
            print(f"{where} {kinds[0]} instead of {kinds[1]}", flush=True)
            return True
        return False
    off = differing(found, expected)
    for name, (largest, relative) in off.items():
        print(f"{where} {name:12} differs by {largest:.2e}, relative {relative:.2e}", flush=True)
    return bool(off)


def options_of(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="store what is found")
    parser.add_argument("--model", default="*", help="models whose names match")
    parser.add_argument("--rule", default="*", help="rules whose names match")
    parser.add_argument("--path", default="*", help="paths whose names match")
    options = parser.parse_args(arguments)
    if options.write and options.path != "*":
        parser.error("--write stores all paths of a rule")
    return options


def main(arguments=None):
    """Return the exit status."""
    options = options_of(arguments)
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)  # compiles in half of the time
    print(f"braintrace of {Path(braintrace.__file__).parents[1]}")
    wrong, start = 0, time.perf_counter()
    for name in [name for name in NETS if fnmatch(name, options.model)]:
        found = {}
        for rule in [rule for rule in RULES if fnmatch(rule, options.rule)]:
            paths = [path for path in paths_of(name, rule) if fnmatch(path, options.path)]
            found[rule] = results(name, rule, paths) if paths else {}
            for path, result in found[rule].items():
                oracle = None if isinstance(result, str) else exact(name, rule, path)
                if oracle is not None:
                    wrong += compare(name, rule, f"{path} (BPTT)", result, oracle)
                if not options.write:
                    wrong += compare(name, rule, path, result, expected_of(name, rule, path))
        if options.write:
            store(NETS[name], found)
        jax.clear_caches()
        print(f"{name} done after {time.perf_counter() - start:.0f} s", flush=True)
    print(f"{wrong} rows differ" if wrong else "nothing differs")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
