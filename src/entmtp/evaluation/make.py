"""One call per pipeline rule: read a run folder's files, build, write."""

from pathlib import Path
from typing import Any

import yaml

from entmtp.config import BenchConfig, PlotConfig
from entmtp.errors import EntmtpError
from entmtp.evaluation import figure_data as read
from entmtp.evaluation import figures as draw
from entmtp.evaluation.page import read_captions
from entmtp.evaluation.replay_page import PARTS, write_replay_page
from entmtp.evaluation.report import CAPTIONED, FIGURES, SCHEDULING, SCHEDULING_FIGURES, SECOND, write_report
from entmtp.evaluation.schema import check_schema
from entmtp.evaluation.summary import build_summary, summarise, write_summary
from entmtp.evaluation.tables import build_tables
from entmtp.io import read_json
from entmtp.layout import command_of, literal, reports_scheduling


def make_summary(
    run: str | Path,
    tasks: list[str],
    policies: list[str],
    bench_config: BenchConfig,
    provenance: dict[str, Any],
    out: str | Path | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Write `<run>/summary.json` (or `out`) from bench/, checks/ and perplexity/ of `tasks`; return it."""
    lossless = read.read_checks(run, "checks/lossless", tasks)
    replay = read.read_checks(run, "checks/replay", tasks)
    perplexity = read.read_checks(run, "perplexity", tasks)
    rows = summarise(read.read_bench(run, tasks), lossless, perplexity, bench_config, policies, seed)
    summary = build_summary(rows, lossless, replay, provenance)
    write_summary(out or Path(run) / "summary.json", summary)
    return summary


def make_tables(summary_path: str | Path, out: str | Path) -> None:
    """Write `<out>/tables/{speed,perplexity,trees}.{csv,md,tex}`."""
    for table in build_tables(read_json(summary_path)["rows"]):
        table.write(Path(out) / "tables")


def make_figures(
    run: str | Path,
    tasks: list[str],
    heads: list[str],
    plot: PlotConfig,
    out: str | Path,
    split: str = "test",
    summary_path: str | Path | None = None,
) -> None:
    """Write `<out>/figures/<name>.{png,svg}` for every name of report.FIGURES.

    `heads`: names of heads whose trees were calibrated; `split`: of the rank traces behind acceptance by entropy.
    """
    rows = read_json(summary_path or Path(run) / "summary.json")["rows"]
    bench = read.read_bench(run, tasks)
    throughput = read.read_trees(run, heads, tasks, "throughput.json")
    recalibrated = read.read_trees(run, heads, tasks, "recalibrated.json")
    banks = read.read_trees(run, heads, tasks, "bank.json")
    if not (throughput and recalibrated and banks):
        raise EntmtpError(f"{run}/trees: no calibrated trees of heads {', '.join(heads)} on {', '.join(tasks)}")
    latency = {name: read_json(Path(run) / "latency" / f"{name}.json") for name in heads}
    generation = read.pick_generation(bench)
    made = {
        "speedup": draw.speedup(rows, plot),
        "throughput_tree_size": draw.throughput_tree_size(throughput, banks, plot),
        "acceptance_frontier": draw.acceptance_frontier(recalibrated, plot),
        "step_latency": draw.step_latency(latency, throughput, read.bench_step_latency(bench), plot),
        "accept_entropy": draw.accept_entropy(read.read_accepted_by_entropy(run, heads, tasks, split), plot),
        "tree_choice": draw.tree_choice(generation, read.read_thresholds(run, generation), plot),
        "scheduler_overhead": draw.scheduler_overhead(rows, plot),
    }
    for name, figure in made.items():
        draw.save_figure(figure, Path(out) / "figures" / name)


def make_report(run: str | Path, out: str | Path, summary_path: str | Path | None = None, replay: bool = True) -> None:
    """Write `<out>/report.html` from summary.json, config.yaml (of `run`) and the PNGs under `<out>/figures`; where the
    run has the second method or the scheduling analysis, from confadapt.json or scheduling.json and their figures under
    `<out>/confadapt` or `<out>/scheduling` too.

    `replay`: whether the page of `make_replay_page` will lie beside it.
    """
    summary = read_json(summary_path or Path(run) / "summary.json")
    config_yaml = _config_of(run)
    config = yaml.safe_load(config_yaml) or {}
    figures = {name: Path(out) / "figures" / f"{name}.png" for name in FIGURES}
    captions, second = read_captions(CAPTIONED), None
    scheduling = None
    if reports_scheduling(config):
        figures |= {name: Path(out) / "scheduling" / f"{name}.png" for name in SCHEDULING_FIGURES}
        captions |= read_captions(SCHEDULING)
        scheduling = read_json(Path(run) / "scheduling.json")["rows"]
    if (config.get("confadapt") or {}).get("enabled"):
        record = read_json(Path(run) / "confadapt.json")
        drawn = ["frontier", *(["training"] if record["training"] else [])]
        figures |= {name: Path(out) / "confadapt" / f"{name}.png" for name in drawn}
        captions, second = captions | read_captions(SECOND), record["rows"]
    write_report(Path(out) / "report.html", summary, build_tables(summary["rows"]), figures, captions, config_yaml,
                 replay, command_of("snakemake --cores all", *_said(config)), second, scheduling)  # fmt: skip


def make_replay_page(run: str | Path, out: str | Path) -> None:
    """Write `<out>/replay_generation.html` from generation.json of `run`."""
    record = read_json(Path(run) / "generation.json")
    check_schema(record, "generation")
    experiment, overrides = _said(yaml.safe_load(_config_of(run)) or {})
    shown = [f"replayed.{key}={literal(record[key])}" for key in ("task", "policy", "prompt_id")]
    page = f"{Path(run).as_posix()}/replay_generation.html"
    again = command_of(f"snakemake --cores all {page}", experiment, [*overrides, *shown])
    write_replay_page(Path(out) / "replay_generation.html", record, read_captions(list(PARTS)), again)


def _config_of(run: str | Path) -> str:
    config = Path(run) / "config.yaml"
    try:
        return config.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise EntmtpError(f"{config}: no such file") from error


def _said(config: dict) -> tuple[str, list[str]]:
    """Experiment and overrides that the run was called with."""
    return str(config.get("experiment", "quick")), list(config.get("overrides") or [])
