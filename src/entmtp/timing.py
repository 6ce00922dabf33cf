"""Timing of one piece of work: the median of single calls."""

import time
from collections.abc import Callable
from statistics import median


def median_ms(
    run: Callable[[], object], repeats: int, warmup: int = 3, before: Callable[[], object] = lambda: None
) -> float:
    """Median milliseconds of `repeats` calls of `run` after `warmup` more; `before` runs ahead of each, untimed."""
    times = []
    for _ in range(warmup + repeats):
        before()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1000 * median(times[warmup:])
