import eval_fixture as fixture
import pandas as pd
import pytest

from entmtp.evaluation import paper
from entmtp.evaluation.make import make_tables
from entmtp.evaluation.tables import Table, build_tables, latex_escape, perplexity_table, speed_table, trees_table
from entmtp.io import write_json


@pytest.fixture(scope="module")
def rows():
    return fixture.summary(medusa="lossy")["rows"]


def test_speed_table_has_ours_the_papers_and_geometric_means(rows):
    data = speed_table(rows).data
    ours = data[(data.source == "measured") & data.task.isin(fixture.TASKS)]
    assert len(ours) == len(rows)
    assert list(ours["over_ar_low"]) == [row["over_ar"]["low"] for row in rows]

    theirs = data[data.source == paper.LABEL]
    human = theirs[theirs.task == "humaneval"].iloc[0]
    assert (human["tokens_per_s"], human["over_hydra"]) == (124.7, 1.14)
    # the paper gives no tokens/s for LitBench: no row is invented
    assert list(theirs.task) == ["humaneval", "all tasks"]
    assert (theirs.iloc[1]["over_ar_low"], theirs.iloc[1]["over_ar_high"]) == (3.13, 3.47)

    mean = data[(data.task == "geometric mean") & (data.policy == "entmtp_tau")].iloc[0]
    own = [row["over_ar"]["ratio"] for row in rows if row["policy"] == "entmtp_tau"]
    assert mean["over_ar"] == pytest.approx((own[0] * own[1]) ** 0.5)


def test_every_paper_row_is_marked_and_lossy_is_labelled(rows):
    for table in build_tables(rows):
        text = table.markdown()
        for line in text.splitlines():
            if "EntMTP-τ" in line:
                assert paper.LABEL in line
        assert "medusa (lossy)" in text and "hydra (lossy)" not in text
    geometric = [line for line in speed_table(rows).markdown().splitlines() if line.startswith("| geometric mean")]
    assert any("medusa (lossy)" in line for line in geometric)


def test_one_task_gets_no_geometric_mean():
    rows = fixture.summary(["humaneval"])["rows"]
    assert "geometric mean" not in set(speed_table(rows).data["task"])


def test_a_reference_outside_the_run_shows_a_dash():
    rows = fixture.summary(policies=["ar", "entmtp_star"])["rows"]
    shown = speed_table(rows).shown
    ours = shown[shown["task"].isin(fixture.TASKS) & ~shown["policy"].str.contains("paper")]
    assert set(ours["× hydra"]) == {"–"} and "–" not in set(ours["× plain decoding"])


def test_perplexity_and_trees_tables(rows):
    shown = perplexity_table(rows).shown
    assert list(shown["lossless"][:3]) == ["n/a", "lossy", "exact"]
    assert list(shown["Δ nats/token"][:2]) == ["+0.0000", "+0.0052"]
    table = trees_table(rows)
    tau = next(row for row in rows if row["policy"] == "entmtp_tau")
    cell = table.shown.iloc[4]["tree nodes: share"]
    assert cell == f"4: {100 * tau['trees']['4']:.0f}%, 8: {100 * tau['trees']['8']:.0f}%"
    assert table.data.iloc[4]["num_accepted"] == tau["num_accepted"]


def test_missing_perplexity_is_a_dash():
    rows = [row | {"ppl": None, "delta_nats": None} for row in fixture.summary()["rows"]]
    assert list(perplexity_table(rows).shown["perplexity"][:2]) == ["–", "–"]


def test_latex_escaping():
    assert latex_escape(r"a_b & 50% {x} \ τ") == r"a\_b \& 50\% \{x\} \textbackslash{} $\tau$"
    frame = pd.DataFrame([["t_1", "p&q", "[1, 2]"]], columns=["task", "policy", "x#"])
    text = Table("name", "100%", frame, frame).latex()
    assert r"t\_1 & p\&q & {[1, 2]} \\" in text and r"x\#" in text and r"\caption{100\%}" in text


def test_latex_is_balanced_and_has_no_bare_specials(rows):
    for table in build_tables(rows):
        lines = table.latex().splitlines()
        body = lines[lines.index(r"\midrule") + 1 : lines.index(r"\bottomrule")]
        cells = len(table.shown.columns)
        for line in (line for line in body if line != r"\addlinespace"):
            assert line.replace(r"\&", "").count("&") == cells - 1 and line.endswith(r"\\")
            assert "%" not in line.replace(r"\%", "") and "_" not in line.replace(r"\_", "")
        assert sum(line.startswith(r"\begin") for line in lines) == sum(line.startswith(r"\end") for line in lines)


def test_markdown_escapes_pipes_and_is_rectangular(rows):
    frame = pd.DataFrame([["a|b", "c"]], columns=["task", "policy"])
    assert "| a\\|b | c |" in Table("name", "", frame, frame).markdown()
    for table in build_tables(rows):
        assert {line.count("|") for line in table.markdown().splitlines()} == {len(table.shown.columns) + 1}


def test_make_tables_writes_nine_files(tmp_path):
    write_json(tmp_path / "summary.json", fixture.summary())
    make_tables(tmp_path / "summary.json", tmp_path)
    names = {path.name for path in (tmp_path / "tables").iterdir()}
    assert names == {f"{name}.{suffix}" for name in ("speed", "perplexity", "trees") for suffix in ("csv", "md", "tex")}
    speed = pd.read_csv(tmp_path / "tables" / "speed.csv")
    assert speed["tokens_per_s"].notna().sum() == len(speed) - 1  # the paper's range over tasks has no tokens/s
