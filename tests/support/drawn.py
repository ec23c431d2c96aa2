"""Examples that hypothesis draws: the same ones at every run."""

import hypothesis


def drawn(examples, *strategies, **options):
    """Call a function with examples, as a decorator; return nothing."""
    same = hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        **options,
    )
    return lambda check: same(hypothesis.given(*strategies)(check))()
