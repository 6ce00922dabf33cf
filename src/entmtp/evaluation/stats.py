"""Ratios of totals with paired percentile bootstrap intervals over prompts. Nothing here is a mean of ratios.

A mean of per-prompt ratios gives a short prompt the weight of a long one and has no meaning as time saved; a ratio of
totals is what a user of the whole workload gets (DESIGN 5).
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from entmtp.errors import EntmtpError

LEVEL = 95  # per cent


def share_interval(share: float, n: int) -> tuple[float, float]:
    """Wilson's interval of a share of n independent trials: unlike share ± standard error it has a width at 0 and 1."""
    from scipy.stats import binomtest

    found = binomtest(round(share * n), n).proportion_ci(LEVEL / 100, method="wilson")
    return float(found.low), float(found.high)


def _totals(resamples: int, seed: int | list[int], *columns: NDArray) -> list[NDArray]:
    """Resampled totals of each column, [resamples] each; one draw of prompts serves all columns (paired)."""
    n = len(columns[0])
    if resamples < 1:
        raise EntmtpError(f"bootstrap: {resamples} resamples; at least 1 is needed (bench.bootstrap)")
    # How often each prompt is drawn: the same as drawing n prompts with replacement. [resamples, n]
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1.0 / n), size=resamples)
    return [drawn @ column for column in columns]


def _interval(values: NDArray) -> tuple[float, float]:
    """Percentile interval; draws without a denominator (all of its prompts were empty) say nothing and are left out."""
    tail = (100 - LEVEL) / 2
    low, high = np.percentile(values[np.isfinite(values)], [tail, 100 - tail])
    return float(low), float(high)


def _columns(**named: ArrayLike) -> list[NDArray]:
    columns = [np.asarray(values, dtype=float) for values in named.values()]
    if len({column.shape for column in columns}) != 1 or columns[0].ndim != 1 or not len(columns[0]):
        shapes = ", ".join(f"{name} {column.shape}" for name, column in zip(named, columns))
        raise EntmtpError(f"bootstrap: one value a prompt is needed in every column, found {shapes}")
    for name, column in zip(named, columns):
        if not np.isfinite(column).all() or (column < 0).any():
            raise EntmtpError(f"bootstrap: {name} has a negative or non-finite value")
    return columns


def ratio_of_totals(
    tokens_a: ArrayLike, seconds_a: ArrayLike, tokens_b: ArrayLike, seconds_b: ArrayLike, resamples: int, seed: int
) -> tuple[float, float, float]:
    """Throughput of a over throughput of b, (Σtokens_a / Σseconds_a) / (Σtokens_b / Σseconds_b): (ratio, low, high).

    All arrays [prompts], the same prompts in the same order. The interval (95%) resamples prompts, a and b together,
    so that what makes a prompt slow for both does not widen it. Raises EntmtpError for other shapes or empty totals.
    """
    columns = _columns(tokens_a=tokens_a, seconds_a=seconds_a, tokens_b=tokens_b, seconds_b=seconds_b)
    totals = [column.sum() for column in columns]
    if min(totals[1:]) <= 0:
        raise EntmtpError("bootstrap: total seconds and the reference's total tokens must be above 0")

    def ratio(a: NDArray, seconds: NDArray, b: NDArray, seconds_of_b: NDArray) -> NDArray:
        return (a * seconds_of_b) / (seconds * b)

    with np.errstate(divide="ignore", invalid="ignore"):
        resampled = ratio(*_totals(resamples, seed, *columns))
    return (float(ratio(*totals)), *_interval(resampled))


def ratio_interval(
    tokens_a: ArrayLike, seconds_a: ArrayLike, tokens_b: ArrayLike, seconds_b: ArrayLike, resamples: int, seed: int
) -> dict[str, float]:
    """`ratio_of_totals` as records hold it: {"ratio", "low", "high"}."""
    values = ratio_of_totals(tokens_a, seconds_a, tokens_b, seconds_b, resamples, seed)
    return dict(zip(("ratio", "low", "high"), values, strict=True))


def total_over_total(
    numerator: ArrayLike, denominator: ArrayLike, resamples: int, seed: int
) -> tuple[float, float, float]:
    """Σnumerator / Σdenominator with its bootstrap interval (95%) over prompts: (value, low, high).

    Arrays [prompts]; e.g. accepted draft tokens and steps give the mean num_accepted of a step. Raises EntmtpError
    for other shapes or an empty denominator.
    """
    top, bottom = _columns(numerator=numerator, denominator=denominator)
    if bottom.sum() <= 0:
        raise EntmtpError("bootstrap: the denominator's total must be above 0")
    tops, bottoms = _totals(resamples, seed, top, bottom)
    with np.errstate(divide="ignore", invalid="ignore"):
        resampled = tops / bottoms
    return (float(top.sum() / bottom.sum()), *_interval(resampled))


def captured_share(
    policy: ArrayLike, static: ArrayLike, bound: ArrayLike, resamples: int, seed: int
) -> dict[str, float] | None:
    """Part of the way from a static tree to the oracle that a policy goes, in tokens/s, with its bootstrap interval
    (95%) over prompts: {"share", "low", "high"}; negative where it loses. Arrays [prompts]: milliseconds on the same
    texts. None where there is no way to go."""
    columns = _columns(policy=policy, static=static, bound=bound)

    def share(ms: NDArray, alone: NDArray, least: NDArray) -> NDArray:
        return (1 / ms - 1 / alone) / (1 / least - 1 / alone)

    own, alone, least = (column.sum() for column in columns)
    if least >= alone * (1 - 1e-9):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = _interval(share(*_totals(resamples, seed, *columns)))
    return {"share": float(share(own, alone, least)), "low": low, "high": high}


def geometric_mean_of_ratios(groups: list[tuple], resamples: int, seed: int) -> dict[str, float]:
    """Geometric mean over groups (tasks) of `ratio_of_totals`' ratio, with an interval (95%) that resamples the prompts
    of each group on its own: {"ratio", "low", "high"}. `groups`: (tokens_a, seconds_a, tokens_b, seconds_b) each."""
    values, resampled = [], np.zeros(resamples)
    for number, group in enumerate(groups):
        names = ("tokens_a", "seconds_a", "tokens_b", "seconds_b")
        columns = _columns(**dict(zip(names, group, strict=True)))
        values.append(ratio_of_totals(*columns, 1, seed)[0])
        a, seconds_a, b, seconds_b = _totals(resamples, [seed, number], *columns)
        resampled += np.log(a * seconds_b / (seconds_a * b))
    low, high = _interval(np.exp(resampled / len(groups)))
    return {"ratio": geometric_mean(values), "low": low, "high": high}


def geometric_mean(values: ArrayLike) -> float:
    """Geometric mean of positive values, for a figure over tasks. Raises EntmtpError for none or one <= 0."""
    array = np.asarray(values, dtype=float)
    if not len(array) or not (array > 0).all():
        raise EntmtpError("geometric mean: positive values are needed")
    return float(np.exp(np.log(array).mean()))
