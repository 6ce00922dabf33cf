"""`python -m entmtp.replay_bench`: how fast exact replay is, on the traces and the latency table of a finished run.

Counts simulated steps a second on one core, sweeps 400 pairs of thresholds over every task's bank, and does the paper's
three stages anew (greedy construction, recalibration, throughput evaluation). Writes replay.json and replay.md into
`results`. Hydra overrides apply (`experiment=main`, `results=…`).
"""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from entmtp.calibration import kernels
from entmtp.calibration.latency_table import LatencyTable
from entmtp.calibration.replay import ReplayObserver, Trace
from entmtp.calibration.search import frontier_json, recalibrated_json, search_frontier
from entmtp.calibration.throughput import choose_shortlist, predict
from entmtp.command import run_command
from entmtp.config import Config, compose
from entmtp.errors import EntmtpError
from entmtp.evaluation.tables import markdown_table
from entmtp.io import read_json, read_parquet, write_json, write_text
from entmtp.layout import run_folder
from entmtp.policy.fit import step_times
from entmtp.tree.bank import Bank
from entmtp.tree.topology import Tree

PAIRS = 400
LEAST = 0.5  # seconds that steps are counted over


def measure(config: Config, task: str) -> dict:
    """One task's row. Seconds are of the second time: the first compiles."""
    run, kind = run_folder(config), config.heads.name
    bank = Bank.load(_need(run / "trees" / kind / task / "bank.json"))
    latency = LatencyTable.from_json(read_json(_need(run / "latency" / f"{kind}.json")))
    path = _need(run / "traces" / kind / f"{task}.calib.parquet")
    trace = Trace.from_frame(read_parquet(path))
    signal = trace.path_values(min(2, trace.depth))
    lengths = trace.lengths([entry.tree for entry in bank.trees])
    pairs = threshold_pairs(signal)
    steps, seconds = _counted(lambda: _swept(lengths, signal, trace.bounds, pairs[:1], bank.star))
    uses, sweep_s = timed(lambda: _swept(lengths, signal, trace.bounds, pairs, bank.star))
    depth = min(2, trace.depth)
    speeds = _speeds(uses, trace, step_times(bank, latency, [entry.tree for entry in bank.trees], depth))
    best = int(speeds.argmax())
    return {
        "task": task,
        "texts": len(trace.prompts),
        "positions": len(trace.ranks),
        "steps_per_s": steps / seconds,
        "pairs": len(pairs),
        "sweep_s": sweep_s,
        "tau_on": float(pairs[best, 0]),
        "tau_off": float(pairs[best, 1]),
        "within_1_percent": int((speeds >= 0.99 * speeds[best]).sum()),
        "stages_s": timed(lambda: three_stages(config, path, latency))[1],
    }


def _need(path: Path) -> Path:
    if not path.is_file():
        raise EntmtpError(f"{path} is missing: finish the run first (`snakemake --cores all --config experiment=…`)")
    return path


def threshold_pairs(signal: NDArray[np.float64]) -> NDArray[np.float64]:
    """PAIRS (tau_on, tau_off) with tau_off <= tau_on at quantiles of the signal: [PAIRS, 2]."""
    side = int(np.ceil((np.sqrt(8 * PAIRS + 1) - 1) / 2))  # side · (side + 1) / 2 pairs of a triangle
    grid = np.quantile(signal, np.linspace(0.02, 0.98, side))
    return np.array([(grid[on], grid[off]) for on in range(side) for off in range(on + 1)])[:PAIRS]


def _swept(lengths: NDArray, signal: NDArray, bounds: NDArray, pairs: NDArray, start: int) -> NDArray[np.int64]:
    """Steps with each tree under each pair of thresholds: [pairs, trees]."""
    uses = np.zeros((len(pairs), len(lengths)), dtype=np.int64)
    kernels.sweep_tau(lengths, signal, bounds, pairs, start, uses)
    return uses


def _speeds(uses: NDArray, trace: Trace, step_ms: list[float]) -> NDArray[np.float64]:
    return 1000 * (int(trace.bounds[-1]) - len(trace.prompts)) / (uses @ np.array(step_ms))


def _counted(run: Callable[[], NDArray]) -> tuple[int, float]:
    """(simulated steps, seconds) of at least LEAST seconds."""
    each, total, start = int(run().sum()), 0, time.perf_counter()
    while (seconds := time.perf_counter() - start) < LEAST:
        run()
        total += each
    return total, seconds


def timed(run: Callable) -> tuple[object, float]:
    """What `run` gives the second time, and the seconds that it took."""
    run()
    start = time.perf_counter()
    made = run()
    return made, time.perf_counter() - start


def three_stages(config: Config, traces: Path, latency: LatencyTable) -> list[int]:
    """Frontier, recalibration and predicted throughput from the file of traces; the trees worth timing."""
    trace = Trace.from_frame(read_parquet(traces))
    grown = search_frontier(ReplayObserver(trace), config.search, trace.width)
    frontier = recalibrated_json(frontier_json(grown, config.search), trace, "", "")
    trees = [Tree(()), *(Tree.of(row["paths"]) for row in frontier["trees"])]
    return choose_shortlist(predict(trees, trace, latency), config.bank.shortlist)


def markdown(rows: list[dict], about: dict) -> str:
    heads = ["task", "texts", "positions", "million steps a second", f"{PAIRS} threshold pairs, ms",
             "pairs within 1% of the best", "the three stages, s"]  # fmt: skip
    body = [[row["task"], str(row["texts"]), f"{row['positions']:,}", f"{row['steps_per_s'] / 1e6:.0f}",
             f"{1000 * row['sweep_s']:.1f}", str(row["within_1_percent"]), f"{row['stages_s']:.2f}"]
            for row in rows]  # fmt: skip
    total = ["all", "", "", "", f"{1000 * sum(row['sweep_s'] for row in rows):.1f}", "",
             f"{sum(row['stages_s'] for row in rows):.2f}"]  # fmt: skip
    where = f"{about['cpu']}, one core, experiment {about['experiment']}, compiled beforehand."
    return f"# Replay\n\n{where}\n\n" + markdown_table(heads, [*body, total], names=1)


def main(overrides: list[str]) -> None:
    from entmtp.provenance import provenance

    config = compose(overrides)
    rows = [measure(config, task) for task in config.tasks]
    about = provenance({"experiment": config.experiment, "target": config.target.name, "dtype": config.dtype})
    folder = Path(config.results)
    write_json(folder / "replay.json", {"rows": rows, "provenance": about})
    write_text(folder / "replay.md", markdown(rows, about))
    print(markdown(rows, about))


if __name__ == "__main__":
    run_command(main, __doc__)
