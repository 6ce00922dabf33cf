"""Markdown and figures of a run's records, from the content of scheduling.json or confadapt.json alone."""

from pathlib import Path
from typing import Any

from entmtp.config import PlotConfig
from entmtp.evaluation import confadapt_report
from entmtp.evaluation.figures import save_figure
from entmtp.evaluation.figures_science import (
    accuracy_frontier,
    headroom,
    predicted_against_measured,
    training_curves,
)
from entmtp.io import write_text
from entmtp.science import report as scheduling_report


def make_scheduling(record: dict[str, Any], plot: PlotConfig, folder: str | Path) -> None:
    """Write `<folder>/scheduling.md` and the figures `headroom` and `prediction`."""
    write_text(Path(folder) / "scheduling.md", scheduling_report.markdown(record))
    save_figure(headroom(record["rows"], plot), Path(folder) / "headroom")
    save_figure(predicted_against_measured(record["rows"], plot), Path(folder) / "prediction")


def make_confadapt(record: dict[str, Any], plot: PlotConfig, folder: str | Path) -> None:
    """Write `<folder>/confadapt.md` and the figure `frontier`, and `training` if the run trained its model."""
    write_text(Path(folder) / "confadapt.md", confadapt_report.markdown(record["rows"]))
    save_figure(accuracy_frontier(record["rows"], plot), Path(folder) / "frontier")
    if record["training"]:
        save_figure(training_curves(record["training"]["curve"], plot), Path(folder) / "training")
