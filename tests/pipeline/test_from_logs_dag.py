"""The smoke DAG's tables and figures, made again from the W&B runs that it left."""

import subprocess
import sys

from .conftest import snakemake
from .test_notebook import execute


def regenerate(folder, *arguments):
    command = [sys.executable, "-m", "entmtp.from_logs", "experiment=smoke", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)


def test_tables_from_logs_are_those_from_files(smoke, tmp_path):
    done = snakemake(smoke, "results/smoke/tracking/records/scheduling.json")  # judges the run, and tracks the record
    assert done.returncode == 0, done.stderr[-3000:]
    done = regenerate(smoke, f"--out={tmp_path / 'out'}", "--compare")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all equal, byte for byte" in done.stdout
    run, out = smoke / "results" / "smoke", tmp_path / "out"
    made = sorted(str(path.relative_to(out)) for part in ("tables", "figures", "scheduling")
                  for path in (out / part).iterdir())  # fmt: skip
    assert len([name for name in made if name.endswith(".csv")]) == 3
    assert len([name for name in made if name.endswith(".svg")]) == 7 + 2
    for name in ["summary.json", *made]:
        assert (out / name).read_bytes() == (run / name).read_bytes(), name


def test_no_file_of_the_run_is_read(smoke, tmp_path, monkeypatch):
    """From another folder, with nothing but the logs; the analysis notebook reads what comes out."""
    (tmp_path / "logs").symlink_to(smoke / "logs")
    done = regenerate(tmp_path, "--out=made")
    assert done.returncode == 0, done.stdout + done.stderr
    made = tmp_path / "made"
    for path in (smoke / "results" / "smoke" / "tables").iterdir():
        assert (made / "tables" / path.name).read_bytes() == path.read_bytes(), path.name
    monkeypatch.setenv("ENTMTP_RUN", str(made))
    _, text = execute("analysis.ipynb")
    assert "entmtp_tau" in text
