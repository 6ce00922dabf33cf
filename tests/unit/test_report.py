import re
from html.parser import HTMLParser
from pathlib import Path

import eval_fixture as fixture
import nbformat
import pytest

from entmtp.config import PlotConfig
from entmtp.errors import EntmtpError
from entmtp.evaluation.make import make_figures, make_report, make_summary
from entmtp.evaluation.report import FIGURES, TABLES, flat, headlines, read_captions, verdicts, write_report
from entmtp.evaluation.tables import build_tables

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "analysis.ipynb"


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    fixture.write_run(folder)
    make_summary(folder, fixture.TASKS, fixture.POLICIES, fixture.CONFIG, fixture.PROVENANCE)
    make_figures(folder, fixture.TASKS, ["hydra", "medusa"], PlotConfig(dpi=30), folder)
    make_report(folder, folder)
    return folder


def test_report_is_well_formed_and_self_contained(run):
    text = (run / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    addresses = [value for name, value in page.attributes if name in ("src", "href", "srcset", "data", "action")]
    assert addresses and all(value.startswith(("data:", "#")) for value in addresses)
    assert not re.search(r"url\(|@import|<script", text)
    targets = {value for name, value in page.attributes if name == "id"}
    assert {value[1:] for value in addresses if value.startswith("#")} <= targets
    assert ("name", "viewport") in page.attributes


def test_report_holds_every_figure_table_caption_and_verdict(run):
    text = (run / "report.html").read_text()
    page = Page(text)
    assert page.tags.count("img") == len(FIGURES) == text.count("data:image/png;base64,")
    ids = [value for name, value in page.attributes if name == "id"]
    assert [name for name in ids if name.startswith("table-")] == [f"table-{name}" for name in TABLES]
    assert page.tags.count("figcaption") == len(FIGURES) + len(TABLES)
    for caption in read_captions().values():
        assert caption[:60].replace("'", "&#39;") in text
    assert text.count("<td>equal</td>") == len(fixture.TASKS) * len(fixture.POLICIES)
    # results come first
    assert text.index("fastest policy") < text.index('id="speed"') < text.index('id="provenance"')


def test_values_are_escaped(run):
    text = (run / "report.html").read_text()
    assert "test &lt;cpu&gt; &amp; co" in text and "test <cpu>" not in text
    assert "note: a &lt; b &amp; c" in text


def test_headline_is_the_fastest_policy_that_keeps_the_text():
    rows = fixture.summary()["rows"]
    assert [row["policy"] for row in headlines(rows)] == ["entmtp_star", "entmtp_star"]
    lossy = fixture.summary(entmtp_star="lossy")["rows"]
    assert [row["policy"] for row in headlines(lossy)] == ["entmtp_tau", "entmtp_tau"]


def test_verdicts_pair_lossless_with_replay():
    checks = fixture.summary()["checks"]
    del checks["replay"]["humaneval"]["medusa"]
    rows = {(row["task"], row["policy"]): row for row in verdicts(checks)}
    assert rows["humaneval", "hydra"]["replay"] == {"verdict": "equal", "steps": 90}
    assert rows["humaneval", "medusa"]["replay"]["verdict"] == "n/a"


def test_flat():
    assert flat({"a": {"b": 1, "c": [1, 2]}, "d": None}) == [("a.b", "1"), ("a.c", "1, 2"), ("d", "None")]


def test_missing_figure_or_caption_is_an_error(tmp_path):
    summary = fixture.summary()
    tables = build_tables(summary["rows"])
    with pytest.raises(EntmtpError, match=r"speedup\.png: no such figure"):
        write_report(tmp_path / "r.html", summary, tables, {"speedup": tmp_path / "speedup.png"}, read_captions(), "")
    with pytest.raises(EntmtpError, match="no caption for speed"):
        write_report(tmp_path / "r.html", summary, tables, {}, {}, "")
    assert not (tmp_path / "r.html").exists()


def test_notebook_is_valid_and_committed_without_outputs():
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(book)
    assert all(cell.get("id") for cell in book.cells)
    assert all(not cell.outputs and cell.execution_count is None for cell in book.cells if cell.cell_type == "code")


@pytest.mark.parametrize(("tasks", "policies"), [(fixture.TASKS, fixture.POLICIES), (["humaneval"], ["ar", "hydra"])])
def test_notebook_runs_on_any_results(tmp_path, monkeypatch, tasks, policies):
    from nbclient import NotebookClient

    fixture.write_run(tmp_path, tasks, policies)
    make_summary(tmp_path, tasks, policies, fixture.CONFIG, {})
    monkeypatch.setenv("ENTMTP_RUN", str(tmp_path))
    book = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(book, timeout=120, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    pictures = [
        o for cell in book.cells if cell.cell_type == "code" for o in cell.outputs if "image/png" in o.get("data", {})
    ]
    assert len(pictures) >= 4
