"""policy.json as it is read back: every value typed and in range before a policy is built from it."""

from pathlib import Path
from typing import Any

from entmtp.errors import EntmtpError

NEEDS = {
    "ar": (),
    "static": ("tree",),
    "star": ("trees", "start"),
    "ladder": ("trees", "start", "thresholds"),  # without a depth: one tree, and no signal
    "tau": ("trees", "start", "depth", "tau_on", "tau_off"),
    "cost_aware": ("trees", "start", "cost_aware"),
    "adaptive": ("trees", "start", "cost_aware"),
    "bandit": ("trees", "bandit"),
    "dynamic": ("growing",),
    "marginal": ("growing",),
}
COST_AWARE_NEEDS = ("floor", "curves", "step_ms", "rate", "accepted", "window", "memory")
GROWING_NEEDS = ("nodes", "beam", "children", "max_depth", "expand", "rate", "step_ms", "calibration")


def is_number(value: Any) -> bool:
    """Finite, and no integer of a thousand digits either."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e30 < value < 1e30


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _list_of(fits, value: Any) -> bool:
    return isinstance(value, list) and all(fits(item) for item in value)


def _numbers(value: Any) -> bool:
    return _list_of(is_number, value)


def _calibration(value: Any) -> bool:
    """Per depth ascending edges, and one more value than edges."""
    if not isinstance(value, dict) or set(value) != {"edges", "values"}:
        return False
    edges, values = value["edges"], value["values"]
    return (
        _list_of(_numbers, edges)
        and all(row == sorted(row) for row in edges)
        and _list_of(_numbers, values)
        and [len(row) for row in values] == [len(row) + 1 for row in edges]
    )


def _growing(value: Any) -> bool:
    if not isinstance(value, dict) or not set(GROWING_NEEDS) <= set(value):
        return False
    counts = all(is_count(value[key]) and value[key] > 0 for key in ("nodes", "beam", "children", "max_depth"))
    if not counts or not is_number(value["expand"]) or not _numbers(value["step_ms"]):
        return False
    if value["rate"] is None:  # a fixed number of nodes: nothing to weigh
        return value["calibration"] is None or _calibration(value["calibration"])
    enough = len(value["step_ms"]) > value["nodes"]
    calibrated = _calibration(value["calibration"]) and len(value["calibration"]["edges"]) >= value["max_depth"]
    return is_number(value["rate"]) and enough and calibrated


def _positive(value: Any) -> bool:
    return is_number(value) and value > 0


def _curve(value: Any) -> bool:
    """A signal's name, ascending knots, and a value a tree and knot (as many as knots: `Curve` says)."""
    return (
        isinstance(value, dict)
        and set(value) == {"signal", "knots", "accepted"}
        and isinstance(value["signal"], str)
        and _numbers(value["knots"])
        and _list_of(_numbers, value["accepted"])
    )


def _cost_aware(value: Any) -> bool:
    if not isinstance(value, dict) or not set(COST_AWARE_NEEDS) <= set(value):
        return False
    whole = [value["window"], *([] if value["memory"] is None else [value["memory"]])]
    return (
        _numbers(value["floor"])
        and _list_of(_curve, value["curves"])
        and _list_of(_positive, value["step_ms"])
        and _positive(value["rate"])
        and is_number(value["accepted"])
        and value["accepted"] >= 0
        and all(is_count(number) and number > 0 for number in whole)
    )


def _bandit(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"explore", "step_ms"}
        and is_number(value["explore"])
        and value["explore"] >= 0
        and _list_of(_positive, value["step_ms"])
    )


FITS = {
    "policy": lambda value: isinstance(value, str),
    "kind": lambda value: isinstance(value, str),
    "heads": lambda value: value is None or isinstance(value, str),
    "tree": lambda value: value is None or isinstance(value, str),
    "depth": lambda value: value is None or is_count(value),
    "tau_on": lambda value: value is None or is_number(value),
    "tau_off": lambda value: value is None or is_number(value),
    "thresholds": lambda value: value is None or _numbers(value),
    "trees": lambda value: _list_of(is_count, value),
    "start": lambda value: value is None or is_count(value),
    "growing": lambda value: value is None or _growing(value),
    "cost_aware": lambda value: value is None or _cost_aware(value),
    "bandit": lambda value: value is None or _bandit(value),
}


def check_stored(value: Any, path: Path) -> dict:
    """A policy.json's content, or EntmtpError that names file and key."""
    if not isinstance(value, dict):
        raise EntmtpError(f"{path}: not a fitted policy (a JSON object is expected)")
    for key, fits in FITS.items():
        if not fits(value.get(key, [] if key == "trees" else None)):
            raise EntmtpError(f"{path}: not a fitted policy (key '{key}' is {value.get(key)!r:.60}); fit it again")
    for key in NEEDS.get(value["kind"], ()):
        if value.get(key) is None or (key == "trees" and not value[key]):
            raise EntmtpError(f"{path}: a policy of kind {value['kind']} needs '{key}'; fit it again")
    if value["kind"] == "ladder" and value["thresholds"] and value.get("depth") is None:
        raise EntmtpError(f"{path}: thresholds need the 'depth' of their path value; fit it again")
    if value.get("trees") and (value.get("start") or 0) >= len(value["trees"]):
        raise EntmtpError(f"{path}: starts with tree {value['start']} of {len(value['trees'])}; fit it again")
    return {"trees": [], "growing": None, **value}


def check_indices(value: dict, bank_size: int, path: Path) -> None:
    """The bank must have the trees that the policy names."""
    if value["trees"] and max(value["trees"]) >= bank_size:
        raise EntmtpError(
            f"{path}: names tree {max(value['trees'])}, but the bank beside it has {bank_size}: they are of two runs"
        )
