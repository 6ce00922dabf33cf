"""The two pages of a finished run: their numbers without a browser, and their behaviour in headless Chromium.

Where no Chromium is installed the tests that need one are skipped; `apt-get install chromium` brings it on Debian, and
$CHROMIUM names another executable. $ENTMTP_SCREENSHOTS names a folder for pictures of both pages at both widths.
"""

import json
import os
from pathlib import Path

import pytest
from html_page import Page

from entmtp.evaluation.report import FIGURES
from entmtp.evaluation.schema import check_schema

from .browser import Browser, find_browser

PAGES = ("report.html", "replay_generation.html")
WIDTHS = (390, 1280)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium here: `apt-get install chromium`, or name one in $CHROMIUM")
    browser = Browser(executable, tmp_path_factory.mktemp("browser") / "profile")
    yield browser
    browser.close()


@pytest.fixture
def address(smoke):
    return lambda name: (smoke / "results" / name).as_uri()


@pytest.fixture
def record(smoke) -> dict:
    return json.loads((smoke / "results/smoke/generation.json").read_text())


# --- without a browser ------------------------------------------------------------------------------------------


def test_the_recorded_generation_is_the_timed_one(record):
    check_schema(record, "generation")
    assert record["equal"] and record["experiment"] == "smoke"
    assert any(len(step["parents"]) > 1 for step in record["steps"]), "nothing was drafted: nothing to see"
    assert all(step["entropy"] is not None and step["ms"] > 0 for step in record["steps"])


def test_the_report_shows_the_summarys_rows(smoke):
    summary = json.loads((smoke / "results/summary.json").read_text())
    page = Page((smoke / "results/report.html").read_bytes().decode()).root
    rows = page.id("table-speed").all("tbody")[0].all("tr")
    shown = {(row.attributes["data-task"], row.attributes["data-policy"]): row for row in rows}
    for row in summary["rows"]:
        cells = shown[row["task"], row["policy"]].all("td")
        assert float(cells[3].attributes["data-value"]) == row["tokens_per_s"]
        assert float(cells[4].attributes["data-value"]) == row["over_ar"]["ratio"]
    policies = {row["policy"] for row in summary["rows"]}
    assert {term.text for term in page.all("dt")} == {*policies, "sharegpt", "litbench"}
    assert "snakemake --cores all --config experiment=smoke" in page.text


def test_the_replay_page_holds_the_whole_text(smoke, record):
    page = Page((smoke / "results/replay_generation.html").read_bytes().decode()).root
    assert page.id("text").text == "".join(record["pieces"]) + (record["stop"] or "")
    assert len(page.id("steps").all("tbody")[0].all("tr")) == len(record["steps"])


# --- in a browser -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_loads_whole_and_by_itself(browser, address, name, width):
    browser.open(address(name), width)
    if folder := os.environ.get("ENTMTP_SCREENSHOTS"):
        browser.screenshot(Path(folder) / f"{Path(name).stem}-{width}.png")
    assert browser.problems() == []
    loaded = [url for url in browser.requests() if not url.startswith(("data:", "about:"))]
    assert loaded == [address(name)]
    assert browser.js("innerWidth") == width
    wide = browser.js("[document.documentElement.scrollWidth, document.body.scrollWidth]")
    assert max(wide) <= width, "the page itself scrolls sideways"
    pictures = browser.js("[...document.images].map(i => i.complete && i.naturalWidth > 0 && i.clientWidth > 100)")
    drawings = browser.js(
        "[...document.querySelectorAll('svg')].map(s => s.children.length > 0 && s.getBoundingClientRect().width > 40)"
    )
    assert all(pictures) and all(drawings)
    assert (len(pictures), len(drawings)) == ((len(FIGURES), 0) if name == "report.html" else (0, 2))
    small = browser.js(
        "[...document.querySelectorAll('p, td, th, figcaption, li, svg text')]"
        ".filter(e => parseFloat(getComputedStyle(e).fontSize) < 11).length"
    )
    assert small == 0, "text too small to read"


def column(browser: Browser, table: str, number: int) -> list[float | str]:
    """What a table's column shows, from top to bottom."""
    return browser.js(
        f"[...document.querySelector('{table} tbody').rows].map(row => row.cells[{number}])"
        ".map(c => c.dataset.value === undefined ? c.textContent : Number(c.dataset.value))"
    )


def in_order(values: list, descending: bool) -> list:
    """Numbers in order, then words, then dashes; the last two keep their places where they are alike."""
    numbers = sorted((v for v in values if not isinstance(v, str)), reverse=descending)
    words = sorted((v for v in values if isinstance(v, str) and v != "–"), reverse=descending)
    return [*numbers, *words, *(v for v in values if v == "–")]


@pytest.mark.parametrize("number", [3, 5])
def test_a_click_on_a_heading_sorts_and_the_third_restores(browser, address, number):
    browser.open(address("report.html"), 1280)
    written = column(browser, "#table-speed", number)
    assert written != in_order(written, False) and any(isinstance(value, str) for value in written)
    head = f"#table-speed th:nth-child({number + 1})"
    state = f"document.querySelector('{head}').getAttribute('aria-sort')"
    assert browser.js(state) == "none"
    for expected, values in (
        ("ascending", in_order(written, False)),
        ("descending", in_order(written, True)),
        ("none", written),
    ):
        browser.click(f"{head} button")
        assert (browser.js(state), column(browser, "#table-speed", number)) == (expected, values)
    rows = browser.js("[...document.querySelectorAll('#table-speed tbody tr')].map(r => r.textContent).length")
    assert rows == len(written)


def test_headings_sort_by_keyboard_and_only_one_at_a_time(browser, address):
    browser.open(address("report.html"), 390)
    browser.js("document.querySelector('#table-trees th:nth-child(2) button').focus()")
    browser.press("Enter")
    policies = [name for name in column(browser, "#table-trees", 1) if "paper" not in name]
    assert policies == sorted(policies)
    browser.js("document.querySelector('#table-trees th:nth-child(3) button').focus()")
    browser.press(" ")
    lengths = column(browser, "#table-trees", 2)
    assert lengths == in_order(lengths, False)
    states = browser.js("[...document.querySelectorAll('#table-trees th')].map(h => h.getAttribute('aria-sort'))")
    assert states == ["none", "none", "ascending"] + ["none"] * (len(states) - 3)


def shown(browser: Browser) -> set[tuple[str, str]]:
    """(task, policy) of the rows that are to be seen."""
    pairs = browser.js(
        "[...document.querySelectorAll('tr[data-task]')].filter(row => row.getClientRects().length)"
        ".map(row => [row.dataset.task, row.dataset.policy])"
    )
    return {tuple(pair) for pair in pairs}


def test_filters_hide_rows_of_tasks_and_policies(browser, address):
    browser.open(address("report.html"), 1280)
    everything = shown(browser)
    browser.click("details.controls summary")
    browser.click("input[name=task][value=litbench]")
    assert shown(browser) == {pair for pair in everything if pair[0] == "sharegpt"}, "means over tasks go too"
    browser.click("input[name=policy][value=hydra]")
    browser.click("input[name=policy][value=paper]")
    left = shown(browser)
    assert left == {pair for pair in everything if pair[0] == "sharegpt" and pair[1] not in ("hydra", "paper")}
    status = browser.js("document.querySelector('details.controls [role=status]').textContent")
    visible, total = (int(word) for word in status.split() if word.isdigit())
    assert 0 < visible < total
    # sorting does not bring hidden rows back
    browser.click("#table-speed th:nth-child(4) button")
    assert shown(browser) == left
    for name in ("task", "policy"):
        browser.click(f"button[data-name={name}][data-check=all]")
    assert shown(browser) == everything
    browser.click("button[data-name=policy][data-check=none]")
    assert {policy for _, policy in shown(browser)} == {"*"}


def stage(browser: Browser) -> dict:
    """What the replay page shows of its current step."""
    return browser.js(
        """({
            sentence: document.getElementById("sentence").textContent,
            slider: Number(document.getElementById("slider").value),
            now: [...document.querySelectorAll("#text .now")].map(s => Number(s.dataset.step)),
            later: document.querySelectorAll("#text .later").length,
            nodes: Object.fromEntries(["root", "kept", "rejected", "cut", "target"].map(
                role => [role, document.querySelectorAll(`#tree g.node.${role}`).length])),
            edges: document.querySelectorAll("#tree path.edge").length,
        })"""
    )


def is_step(browser: Browser, record: dict, number: int) -> None:
    seen, step, steps = stage(browser), record["steps"][number - 1], len(record["steps"])
    assert seen["sentence"].startswith(f"Step {number} of {steps}, root ")
    assert (seen["slider"], seen["now"], seen["later"]) == (number, [number], steps - number)
    kept, cut = step["committed"] - 1, len(step["accepted"]) - step["committed"]
    nodes = seen["nodes"]
    assert (nodes["root"], nodes["kept"], nodes["cut"]) == (1, kept, cut)
    assert nodes["rejected"] == len(step["parents"]) - 1 - kept - cut
    assert seen["edges"] == sum(nodes.values()) - 1
    ended = step["position"] + step["committed"] == len(record["pieces"])
    assert nodes["target"] == (0 if ended else 1)


@pytest.mark.parametrize("width", WIDTHS)
def test_next_goes_through_every_step(browser, address, record, width):
    browser.open(address("replay_generation.html"), width)
    steps = len(record["steps"])
    assert browser.js("document.getElementById('previous').disabled")
    for number in range(1, steps + 1):
        is_step(browser, record, number)
        if number < steps:
            browser.click("#next")
    assert browser.js("document.getElementById('next').disabled && !document.getElementById('previous').disabled")
    browser.click("#previous")
    is_step(browser, record, steps - 1)
    assert browser.problems() == []


def test_steps_are_reached_by_slider_keys_text_table_and_address(browser, address, record):
    browser.open(address("replay_generation.html"), 1280)
    steps = len(record["steps"])
    browser.press("ArrowRight")
    is_step(browser, record, 2)
    browser.js("document.getElementById('slider').focus()")
    browser.press("ArrowRight")
    is_step(browser, record, 3)
    browser.press("End")
    is_step(browser, record, steps)
    browser.click("#text [data-step='1']")
    is_step(browser, record, 1)
    browser.click(f"#steps a[href='#step-{steps}']")
    browser.js("new Promise(done => setTimeout(done, 50))")  # hashchange comes after the click
    is_step(browser, record, steps)
    browser.click("#signals svg")
    assert abs(stage(browser)["slider"] - (steps + 1) / 2) <= 2
    browser.open(address("replay_generation.html") + "#step-2", 1280)
    is_step(browser, record, 2)


def test_the_curve_marks_the_current_step_and_follows_the_width(browser, address):
    browser.open(address("replay_generation.html"), 1280)
    place = "Number(document.querySelector('#signals .cursor').getAttribute('x'))"
    first = browser.js(place)
    browser.click("#last")
    assert browser.js(place) > first
    size = "document.querySelector('#signals svg').getBoundingClientRect().width"
    before = browser.js(size)
    browser.call("Emulation.setDeviceMetricsOverride", width=390, height=900, deviceScaleFactor=1, mobile=False)
    redrawn = f"(look => look(look))(look => {size} < 390 || new Promise(requestAnimationFrame).then(() => look(look)))"
    assert browser.js(redrawn) and before > 390
    assert browser.js("document.documentElement.scrollWidth") <= 390
