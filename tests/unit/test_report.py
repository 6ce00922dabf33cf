"""The report, read without a browser: well formed, self-contained, and its rows are the summary's."""

import json
import shutil
from pathlib import Path

import eval_fixture as fixture
import nbformat
import pytest
import yaml
from html_page import Element, Page, addresses

from entmtp.config import CONF, KINDS, PlotConfig, TaskConfig, to_plain
from entmtp.errors import EntmtpError
from entmtp.evaluation import cite, glossary, paper
from entmtp.evaluation.figures import save_figure
from entmtp.evaluation.figures_science import headroom, predicted_against_measured
from entmtp.evaluation.grid import cell
from entmtp.evaluation.make import make_figures, make_report, make_summary
from entmtp.evaluation.page import read_captions
from entmtp.evaluation.records import make_confadapt
from entmtp.evaluation.report import (
    CAPTIONED,
    FIGURES,
    flat,
    headlines,
    made_by,
    verdict_counts,
    verdicts,
    write_report,
)
from entmtp.evaluation.tables import build_tables
from entmtp.io import write_json

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "analysis.ipynb"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    fixture.write_run(folder)
    make_summary(folder, fixture.TASKS, fixture.POLICIES, fixture.CONFIG, fixture.PROVENANCE)
    make_figures(folder, fixture.TASKS, ["hydra", "medusa"], PlotConfig(dpi=30), folder)
    make_report(folder, folder)
    return folder


@pytest.fixture(scope="module")
def page(run) -> Element:
    return Page((run / "report.html").read_text(encoding="utf-8")).root


@pytest.fixture(scope="module")
def summary(run) -> dict:
    return json.loads((run / "summary.json").read_text())


def body_rows(page: Element, name: str) -> list[Element]:
    return page.id(f"table-{name}").all("tbody")[0].all("tr")


def values(row: Element) -> list[float | None]:
    found = [one.attributes.get("data-value") for one in row.all("td")]
    return [None if value is None else float(value) for value in found]


def test_report_is_self_contained(page):
    found = addresses(page)
    assert all(value.startswith(("data:", "#")) or value == "replay_generation.html" for value in found)
    assert "replay_generation.html" in found
    ids = [one.attributes["id"] for one in page if "id" in one.attributes]
    assert len(ids) == len(set(ids))
    assert {value[1:] for value in found if value.startswith("#")} <= set(ids)
    assert not any("url(" in style.text or "@import" in style.text for style in page.all("style"))
    (script,) = page.all("script")
    assert "src" not in script.attributes and "fetch(" not in script.text
    assert any(one.attributes.get("name") == "viewport" for one in page.all("meta"))


def test_report_holds_every_figure_table_and_caption(page):
    images = page.all("img")
    assert [one.attributes["src"][:22] for one in images] == ["data:image/png;base64,"] * len(FIGURES)
    assert all(FIGURES[name] in page.id(f"figure-{name}").text for name in FIGURES)
    captions = read_captions(CAPTIONED)
    for name, caption in captions.items():
        figure = page.id(f"{'figure' if name in FIGURES else 'table'}-{name}")
        assert [one.text for one in figure.all("figcaption")] == [caption]
        assert len(caption) > 80, f"{name}: what does a newcomer learn from that?"
    assert len(page.all("figcaption")) == len(captions)


def test_results_come_first(run):
    text = (run / "report.html").read_text()
    places = [text.index(f'id="{name}"') for name in ("table-headlines", "verdicts", "figure-speedup", "reading",
                                                      "cite", "provenance")]  # fmt: skip
    assert places == sorted(places)


def test_rows_of_the_speed_table_are_the_summarys(page, summary):
    rows = {tuple(one.text for one in row.all("td")[:2]): row for row in body_rows(page, "speed")}
    for row in summary["rows"]:
        shown = rows[row["task"], row["policy"]]
        ratios = [row[key]["ratio"] if row[key] else None for key in ("over_ar", "over_hydra", "over_medusa")]
        assert values(shown) == [None, None, None, row["tokens_per_s"], *ratios]
        assert (shown.attributes["data-task"], shown.attributes["data-policy"]) == (row["task"], row["policy"])
        over = row["over_ar"]
        assert shown.all("td")[4].text == f"{over['ratio']:.2f} [{over['low']:.2f}, {over['high']:.2f}]"


def test_rows_of_the_other_tables_are_the_summarys(page, summary):
    quality = [values(row)[2:5] for row in body_rows(page, "perplexity")[:-1]]
    assert quality == [[row["new_tokens"], row["ppl"], row["delta_nats"]] for row in summary["rows"]]
    trees = [values(row) for row in body_rows(page, "trees")[:-1]]
    keys = ("accept_length", "num_accepted", None, "switches", "scheduler_ms", "switch_ms")
    assert [row[2:] for row in trees] == [[key and row[key] for key in keys] for row in summary["rows"]]
    head = [[one.text for one in row.all("td")] for row in body_rows(page, "headlines")]
    assert [row[:2] for row in head] == [[task, "entmtp_star"] for task in fixture.TASKS]


def test_every_row_tells_the_filter_where_it_belongs(page):
    boxes = [(one.attributes["name"], one.attributes["value"]) for one in page.all("input")]
    names = [*fixture.POLICIES, "paper"]
    assert boxes == [("task", task) for task in fixture.TASKS] + [("policy", policy) for policy in names]
    rows = [one for one in page.all("tr") if "data-task" in one.attributes]
    assert {one.attributes["data-task"] for one in rows} == {*fixture.TASKS, "*"}
    assert {one.attributes["data-policy"] for one in rows} == {*names, "*"}
    means = [row for row in body_rows(page, "speed") if row.attributes["data-task"] == "*"]
    assert len(means) == len(fixture.POLICIES) + 1
    theirs = [row for row in body_rows(page, "speed") if row.attributes["data-policy"] == "paper"]
    assert theirs and all(paper.LABEL in row.text and "paper" in row.classes for row in theirs)


def test_the_label_of_a_lossy_policy_is_no_name_for_the_filter(tmp_path):
    summary = fixture.summary(medusa="lossy")
    write_report(tmp_path / "r.html", summary, build_tables(summary["rows"]), {}, read_captions(CAPTIONED), "")
    page = Page((tmp_path / "r.html").read_text()).root
    lossy = [row for row in page.all("tr") if "medusa (lossy)" in row.text]
    assert len(lossy) == 7  # three tables of two tasks, and the mean
    assert {row.attributes["data-policy"] for row in lossy} == {"medusa"}


def second_row(task: str, method: str, accuracy: float, ratio: float, lossless: str) -> dict:
    return {"task": task, "method": method, "prompts": 25, "accuracy": accuracy, "tokens_per_forward": 2.5,
            "drafter_forwards": None, "tokens_per_s": 30 * ratio,
            "over_plain": {"ratio": ratio, "low": 1.0, "high": 3.0}, "ppl": 1.5, "same_text": 0.5,
            "original_text": None, "lossless": lossless}  # fmt: skip


@pytest.mark.parametrize("trained", [True, False])
def test_the_second_method_has_its_table_and_figures_where_the_run_has_it(run, tmp_path, trained):
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    methods = [("k=1", 0.8, 1.0, "n/a"), ("confadapt 0.9", 0.76, 2.71, "lossy"), ("entmtp_star", 0.8, 2.0, "exact")]
    rows = [second_row(task, *method) for task in fixture.TASKS for method in methods]
    curve = [{"step": n, "loss": 1 / n, "agreement": 0.5, "block": 1.0 + n} for n in (1, 2)]
    record = {"rows": rows, "training": {"curve": curve} if trained else None}
    write_json(tmp_path / "confadapt.json", record)
    config = yaml.safe_load((run / "config.yaml").read_text()) | {"confadapt": {"enabled": True}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    make_confadapt(record, PlotConfig(dpi=30), tmp_path / "confadapt")
    make_report(tmp_path, tmp_path)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8")).root
    shown = body_rows(page, "confadapt")
    expected = [[row["accuracy"], 2.5, row["tokens_per_s"], row["over_plain"]["ratio"], 1.5] for row in rows]
    assert [values(row)[2:7] for row in shown] == expected
    assert [row.all("td")[2].text for row in shown[:2]] == ["0.800 [0.609, 0.911]", "0.760 [0.566, 0.885]"]
    assert [row.attributes["data-policy"] for row in shown[:3]] == ["*", "*", "entmtp_star"]
    figures = [one.attributes["id"] for one in page.all("figure")]
    assert ("figure-frontier" in figures, "figure-training" in figures) == (True, trained)
    captions = [one.text for one in page.id("table-confadapt").all("figcaption")]
    assert captions == [read_captions(["confadapt"])["confadapt"]]
    assert page.id("second").text == "Second method" and "#second" in addresses(page)


def scheduling_row(task: str, policy: str, replayed: bool) -> dict:
    ratio, gain = ({key: 1.05, "low": 1.01, "high": 1.09} for key in ("ratio", "gain"))
    return {"task": task, "policy": policy, "live_tokens_per_s": 50.0, "over_static": ratio,
            "replayed_tokens_per_s": 51.0 if replayed else None, "replayed_over_static": ratio if replayed else None,
            "calib_over_static": 1.02 if replayed else None,
            "captured": {"share": 0.5, "low": 0.4, "high": 0.6} if replayed else None, "hindsight_headroom": gain,
            "oracle_headroom": gain, "frontier_headroom": gain, "scheduler_ms": 0.2, "switch_ms": 0.1}  # fmt: skip


def test_what_scheduling_is_worth_has_its_section_where_the_run_has_the_analysis(run, page, tmp_path):
    assert "#scheduling" not in addresses(page)
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    policies = [("entmtp_star", True), ("entmtp_tau", True), ("medusa", False)]
    rows = [scheduling_row(task, *policy) for task in fixture.TASKS for policy in policies]
    write_json(tmp_path / "scheduling.json", {"rows": rows})
    config = yaml.safe_load((run / "config.yaml").read_text())
    config |= {"scheduling": {"in_report": True}, "policies": [name for name, _ in policies]}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    save_figure(headroom(rows, PlotConfig(dpi=30)), tmp_path / "scheduling" / "headroom")
    save_figure(predicted_against_measured(rows, PlotConfig(dpi=30)), tmp_path / "scheduling" / "prediction")
    make_report(tmp_path, tmp_path)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8")).root
    shown = body_rows(page, "scheduling")
    assert [row.attributes["data-policy"] for row in shown] == ["entmtp_tau", "medusa"] * len(fixture.TASKS)
    assert values(shown[0])[2:] == [1.05, 1.05, 1.02, 1.05, 1.05, 1.05, 0.5, 0.2]
    assert values(shown[1])[2:] == [1.05, None, None, 1.05, 1.05, 1.05, None, 0.2]
    assert shown[0].all("td")[2].text == "+5.0% [+1.0, +9.0]" and shown[1].all("td")[8].text == "–"
    figures = [one.attributes["id"] for one in page.all("figure")]
    assert {"figure-headroom", "figure-prediction", "table-scheduling"} <= set(figures)
    assert page.id("scheduling").text == "Scheduling" and "#scheduling" in addresses(page)


def test_verdicts_are_counted_and_listed(page, summary):
    rows = body_rows(page, "verdicts")
    assert len(rows) == len(fixture.TASKS) * len(fixture.POLICIES)
    assert [row.all("td")[5].text for row in rows] == ["equal"] * len(rows)
    said = " ".join(page.id("verdicts").text.split())
    assert said.startswith("Lossless: 8 exact. Replay: 10 equal (900 live steps compared).")
    failed = verdicts(fixture.summary()["checks"])
    failed[3]["lossless"]["verdict"] = "fail"
    assert verdict_counts(failed)["lossless"] == {"exact": 7, "fail": 1}


def test_a_report_without_the_replay_page_does_not_point_to_it(tmp_path):
    summary = fixture.summary()
    write_report(tmp_path / "r.html", summary, [], {}, read_captions(CAPTIONED), "", replay=False)
    assert not any("replay" in value for value in addresses(Page((tmp_path / "r.html").read_text()).root))


def test_values_are_escaped(run):
    text = (run / "report.html").read_text()
    assert "test &lt;cpu&gt; &amp; co" in text and "test <cpu>" not in text
    assert "note: a &lt; b &amp; c" in text


def test_a_cell_parts_its_interval_and_sorts_by_its_number():
    assert (cell("1.47 [1.27, 1.82]", 1.468).text, cell("1.47 [1.27, 1.82]").interval) == ("1.47", "[1.27, 1.82]")
    assert cell("1.47 [1.27, 1.82]", 1.468).value == 1.468
    assert [cell("x", value).value for value in (None, float("nan"), "word", 3)] == [None, None, None, 3.0]


def test_how_to_cite_names_version_commit_and_both_papers(page):
    cff = cite.read_citation()
    made = cite.bibtex(cff, "abc1234567")
    assert made.count("@") == 1 + len(cff["references"]) == 3
    assert f"version = {{{cff['version']}}}" in made and "note = {commit abc1234567}" in made
    assert all(reference["url"] in made for reference in cff["references"])
    for entry in made.split("\n\n"):
        assert entry.count("{") == entry.count("}")
    assert page.id("cite") and cff["title"] in page.text
    assert "commit" not in cite.bibtex(cff, None)


def test_the_facts_a_result_is_read_with():
    known = {"cpu": "A CPU", "threads": 2, "date": "2026-11-30T01:02:03+00:00",
             "git": {"sha": "0123456789abcdef", "dirty": True}}  # fmt: skip
    assert made_by(known) == ["A CPU", "2 threads", "2026-11-30", "commit 0123456789 (changed)"]
    assert made_by({}) == [] and made_by({"git": {"sha": None, "dirty": None}, "device": "H200"}) == ["H200"]


def test_every_kind_of_policy_and_source_of_prompts_is_explained():
    assert set(glossary.KINDS) == set(KINDS)
    files = [yaml.safe_load(path.read_text()) for path in (CONF / "task").glob("*.yaml")]
    assert {task["source"] for task in files} <= set(glossary.SOURCES)
    resolved = {"tasks": {"mine": to_plain(TaskConfig(name="mine", source="file", file="my.jsonl", calib=5, test=7))},
                "policies": {"fast": {"kind": "tau", "heads": "hydra"}}}  # fmt: skip
    rows = [{"task": "mine", "policy": "fast"}, {"task": "mine", "policy": "unresolved"}]
    found = glossary.glossary(json.dumps({"resolved": resolved}), rows)
    assert found["tasks"] == [("mine", "prompts of a file my.jsonl; 5 calibration and 7 test prompts.")]
    assert found["policies"] == [("fast", glossary.KINDS["tau"] + " Drafts with hydra heads.")]
    assert glossary.glossary("", rows) == {"tasks": [], "policies": []}


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
    tables, captions = build_tables(summary["rows"]), read_captions(CAPTIONED)
    with pytest.raises(EntmtpError, match=r"speedup\.png: no such figure"):
        write_report(tmp_path / "r.html", summary, tables, {"speedup": tmp_path / "speedup.png"}, captions, "")
    with pytest.raises(EntmtpError, match=r"no caption for speed, perplexity, trees, headlines"):
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
