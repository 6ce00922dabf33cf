"""Timing of one piece of work: single calls, their median or the fastest."""

import time
from collections.abc import Callable
from statistics import median

import torch


def median_ms(
    run: Callable[[], object], repeats: int, warmup: int = 3, before: Callable[[], object] = lambda: None
) -> float:
    """Median milliseconds of `repeats` calls of `run` after `warmup` more; `before` runs ahead of each, untimed."""
    return median(_milliseconds(run, repeats, warmup, before))


def fastest_ms(run: Callable[[], object], repeats: int, warmup: int = 3) -> float:
    """The fewest milliseconds of such a call: what the machine can do while its other tenants leave it alone."""
    return min(_milliseconds(run, repeats, warmup))


def _milliseconds(
    run: Callable[[], object], repeats: int, warmup: int, before: Callable[[], object] = lambda: None
) -> list[float]:
    times = []
    for _ in range(warmup + repeats):
        before()
        start = time.perf_counter()
        run()
        times.append(1000 * (time.perf_counter() - start))
    return times[warmup:]


def settle(device: str) -> None:
    """Wait for what was left to the device."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def waiting(run: Callable[[], object], device: str) -> Callable[[], object]:
    """`run`, and the wait: without it a clock sees how long launching takes, not the work."""

    def both() -> None:
        run()
        settle(device)

    return both


def cold_ms(run: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None) -> float:
    """`median_ms` of calls that each come after reading far more memory than a cache holds, as in a decoding step."""
    flush = torch.ones(16_000_000)

    def others() -> None:
        flush.sum()
        before()

    return median_ms(run, repeats, warmup=2, before=others)
