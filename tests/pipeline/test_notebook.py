"""The analysis notebook runs on whatever a run left in results/, and reads nothing else."""

import nbformat
from nbclient import NotebookClient

from .conftest import ROOT


def test_analysis_runs_on_the_smoke_results(smoke, monkeypatch):
    monkeypatch.setenv("ENTMTP_RUN", str(smoke / "results" / "smoke"))
    notebook = nbformat.read(ROOT / "notebooks" / "analysis.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.get("outputs") for cell in notebook.cells), "commit notebooks without outputs"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT / "notebooks")}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert any("entmtp_tau" in str(output.get("data", {})) for output in outputs)
