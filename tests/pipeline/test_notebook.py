"""The notebooks run as they are committed: on what a run or a sweep left, and on a file of prompts."""

import json

import nbformat
import pytest
from nbclient import NotebookClient

from .conftest import ROOT
from .test_sweep import sweep

NOTEBOOKS = ROOT / "notebooks"


def execute(name: str) -> tuple[list, str]:
    """Rich outputs (by MIME type) of a notebook, and everything that it printed or showed as text."""
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [output["data"] for output in outputs if "data" in output]
    printed = "".join(output["text"] for output in outputs if output.output_type == "stream")
    return shown, printed + "".join(str(value) for data in shown for key, value in data.items() if key[:4] == "text")


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_committed_valid_and_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code), "commit notebooks without outputs"
    assert notebook.cells[0].cell_type == "markdown", "a notebook says first what it is for"


def test_analysis_runs_on_the_smoke_results(smoke, monkeypatch):
    monkeypatch.setenv("ENTMTP_RUN", str(smoke / "results" / "smoke"))
    shown, text = execute("analysis.ipynb")
    assert any("image/png" in data for data in shown)
    assert "entmtp_tau" in text


def test_a_sweep_is_explored(world, tmp_path, monkeypatch):
    done = sweep(world, "-m", "task=sharegpt,litbench", "policy=entmtp_tau", "policy.tau_on=0.005,0.02,0.05",
                 "policy.tau_off=0.001,0.01", f"hydra.sweep.dir={tmp_path}", "tracking=disabled")  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    monkeypatch.setenv("ENTMTP_SWEEP", str(tmp_path / "rows.parquet"))
    shown, text = execute("sweep.ipynb")
    assert "12 settings, 2 of them skipped" in text
    assert "tau_off=0.01 exceeds tau_on=0.005" in text
    assert len([data for data in shown if "image/png" in data]) == 3, "a heat map a task, and a scatter"
    assert "of 5" in text, "pairs within 1%, of those that were not skipped"


def test_your_own_task_from_a_file_to_a_bank_and_a_table(tmp_path, monkeypatch):
    """Without results and without downloads: the two-layer random target."""
    mine = tmp_path / "mine.jsonl"
    mine.write_text("".join(json.dumps({"prompt": f"Say xylophone {number} times."}) + "\n" for number in range(11)))
    monkeypatch.setenv("ENTMTP_PROMPTS", str(mine))
    shown, text = execute("your_own_task.ipynb")
    assert "Say xylophone" in text
    assert "bank: " in text
    assert "'ar': 'n/a', 'hydra': 'exact', 'entmtp_star': 'exact', 'entmtp_tau': 'exact'" in text
    tables = [data["text/markdown"] for data in shown if "text/markdown" in data]
    assert len(tables) == 3 and "| file | entmtp_tau |" in tables[0] and "× hydra" in tables[0]
