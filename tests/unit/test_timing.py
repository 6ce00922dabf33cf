"""Timing of one piece of work, by a clock that the test moves."""

from types import SimpleNamespace

import pytest

from entmtp import timing


@pytest.fixture
def clock(monkeypatch):
    made = SimpleNamespace(now=0.0)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


def test_the_median_is_of_the_timed_calls_alone(clock):
    """Warm-up calls are slow, what comes before each call is slower: neither counts, and one outlier moves nothing."""
    seconds = iter([9.0, 9.0, 9.0, 0.002, 0.5, 0.001, 0.003, 0.002])

    def run() -> None:
        clock.now += next(seconds)

    def before() -> None:
        clock.now += 100.0

    assert timing.median_ms(run, 5, before=before) == pytest.approx(2.0)
    assert next(seconds, None) is None, "three to warm up and five that count"


def test_an_even_number_of_calls_has_the_mean_of_the_middle_two(clock):
    seconds = iter([0.004, 0.001, 0.003, 0.002])

    def run() -> None:
        clock.now += next(seconds)

    assert timing.median_ms(run, 4, warmup=0) == pytest.approx(2.5)


def test_cold_calls_come_after_other_work_each_time(clock, monkeypatch):
    """Memory is read first, then comes what precedes the call in a step, and only the call is timed."""
    events = []
    flush = SimpleNamespace(sum=lambda: events.append("flush"))
    monkeypatch.setattr(timing, "torch", SimpleNamespace(ones=lambda count: flush if count * 4 > 32 << 20 else None))

    def run() -> None:
        events.append("run")
        clock.now += 0.007

    def before() -> None:
        events.append("before")
        clock.now += 1.0

    assert timing.cold_ms(run, 3, before) == pytest.approx(7.0)
    assert events == ["flush", "before", "run"] * 5, "two to warm up and three that count"


def test_the_fastest_is_of_the_timed_calls_alone(clock):
    seconds = iter([0.0001, 0.004, 0.002, 0.003])

    def run() -> None:
        clock.now += next(seconds)

    assert timing.fastest_ms(run, 3, warmup=1) == pytest.approx(2.0)
