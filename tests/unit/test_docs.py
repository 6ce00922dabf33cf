"""README and docs: every link, path, command and name in them exists, and their examples are what the code takes."""

import ast
import importlib
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from entmtp import config
from entmtp.__main__ import COMMANDS
from entmtp.config import Config, choices, compose

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
GROUPS = ["experiment", "policy", "task", "heads", "target", "decoding", "tracking", "distill", "mtp"]
# what a checkout tracks: paths under it are there or wrong (results/ and resources/ are made)
TRACKED = ("src/", "tests/", "conf/", "docs/", "workflow/", "notebooks/", "profiles/", "entmtp/")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return [(found[1], found[2]) for found in FENCE.findall(page.read_text(encoding="utf-8"))]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def spans(page: Path) -> list[str]:
    return SPAN.findall(prose(page))


def command_lines() -> list[tuple[str, str]]:
    """(page, line) of every line of shell and every code span."""
    lines = []
    for page in PAGES:
        shell = "\n".join(text for language, text in blocks(page) if language in ("", "sh"))
        joined = re.sub(r"\\\n\s*", " ", shell)
        lines += [(name_of(page), line.strip()) for line in [*joined.splitlines(), *spans(page)] if line.strip()]
    return lines


def slugs(page: Path) -> set[str]:
    """Anchors that Markdown's table of contents gives the page's headings."""
    headings = re.findall(r"^#+ +(.*?)(?: *\{ *#([\w.-]+) *\})?$", prose(page), re.MULTILINE)
    return {given or re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())
            for title, given in headings}  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page):
    for target in LINK.findall(SPAN.sub("", prose(page))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{target} is not there"
        assert found.is_relative_to(ROOT), f"{target} leads out of the repository"
        assert not anchor or anchor in slugs(found), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_in_code_spans_are_there(page):
    if name_of(page) in ("CHANGELOG.md", "docs/LOG.md"):  # they tell of their own day
        return
    for span in spans(page):
        path = span.partition("::")[0]
        source = "/" in path and path.endswith((".py", ".c"))
        if re.fullmatch(r"[\w./-]+\.\w+", path) and (source or path.startswith(TRACKED)):
            assert any((base / path).exists() for base in (ROOT, ROOT / "src", ROOT / "src/entmtp")), f"`{span}`"


def test_every_make_target_is_in_the_makefile():
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = re.compile(r"(?:^|[;&|] *)make ([a-z-]+)")
    named = {(page, target) for page, line in command_lines() for target in asked.findall(line)}
    assert {"reproduce", "test", "docs", "coverage", "test-wheel"} <= {target for _, target in named}
    assert not {(page, target) for page, target in named if target not in targets}


def test_every_command_is_a_module_with_a_command_line():
    called = re.compile(r"python -m (entmtp[a-z_.]*)")
    named = {(page, name.rstrip(".")) for page, line in command_lines() for name in called.findall(line)}
    assert len(named) > 5
    for page, module in named:
        spec = importlib.util.find_spec(module)
        assert spec is not None, f"{page}: {module}"
        origin = spec.origin if module != "entmtp" else str(ROOT / "src/entmtp/__main__.py")
        assert '__name__ == "__main__"' in Path(origin).read_text(), f"{page}: {module}"
    short = {(page, name) for page, line in command_lines() for name in re.findall(r"^entmtp ([a-z][a-z-]*)", line)}
    assert not {(page, name) for page, name in short if name not in COMMANDS}


def test_every_rule_that_snakemake_is_asked_for_exists():
    rules = {name for path in (ROOT / "workflow/rules").glob("*.smk")
             for name in re.findall(r"^rule (\w+):", path.read_text(), re.MULTILINE)}  # fmt: skip
    asked = re.compile(r"\bsnakemake ([a-z_]+)\b(?!/)")
    named = {(page, rule) for page, line in command_lines() for rule in asked.findall(line)}
    assert {"heads", "scheduling"} <= {rule for _, rule in named}
    assert not {(page, rule) for page, rule in named if rule not in rules}


def user_files(page: Path) -> dict[str, str]:
    """Configuration files that a page has its reader write: {"experiment/mine.yaml": text}."""
    found = {}
    for language, text in blocks(page):
        first = re.match(r"(?:# @package _global_\n)?# conf/([\w/]+\.yaml)\n", text) if language == "yaml" else None
        if first:
            found[first[1]] = text
    return found


def test_names_in_overrides_are_files_of_the_configuration():
    written = {Path(path).stem for page in PAGES for path in user_files(page)}
    checked = 0
    for page, line in command_lines():
        for group, names in re.findall(rf"(?<![\w.])({'|'.join(GROUPS)})=([a-z][\w,]*)(?![\w(/\"'])", line):
            for name in names.split(","):
                assert name in written or name in choices(group), f"{page}: {line}: {group}={name}"
                checked += 1
    assert checked > 20


def test_keys_in_overrides_are_keys_of_the_configuration():
    whole = compose([])
    for page, line in command_lines():
        for key in re.findall(r"(?<![\w.+])((?:[a-z_]+\.)+[a-z_]+)=", line):
            if key.split(".")[0] not in Config.__dataclass_fields__:
                continue  # hydra.launcher.n_jobs
            value = whole
            for part in key.split("."):
                assert hasattr(value, part), f"{page}: {line}: {key}"
                value = getattr(value, part)


def test_the_files_that_readers_write_compose(tmp_path, monkeypatch):
    shutil.copytree(config.CONF, tmp_path / "conf")
    found = {path: text for page in PAGES for path, text in user_files(page).items()}
    assert {"experiment/mine.yaml", "target/mymodel.yaml", "experiment/myprompts.yaml"} <= set(found)
    for path, text in found.items():
        (tmp_path / "conf" / path).write_text(text)
    monkeypatch.setattr(config, "CONF", tmp_path / "conf")
    for path in found:
        group, name = Path(path).parent.name, Path(path).stem
        made = compose([f"{group}={name}"])
        assert (made.experiment if group == "experiment" else made.target.name) == name


WITH_PYTHON = [page for page in PAGES if any(language == "python" for language, _ in blocks(page))]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_python_examples_are_python(page):
    for language, text in blocks(page):
        if language == "python":
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom) and node.module.startswith("entmtp"):
                    module = importlib.import_module(node.module)
                    assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


# --- the site ----------------------------------------------------------------------------------------------------


def navigation(entries: list) -> list[str]:
    """Pages of mkdocs.yml, in order."""
    pages = []
    for entry in entries:
        (value,) = entry.values() if isinstance(entry, dict) else [entry]
        pages += navigation(value) if isinstance(value, list) else [value]
    return pages


def test_every_page_is_in_the_navigation_once():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = navigation(site["nav"])
    assert len(set(listed)) == len(listed)
    assert not [page for page in listed if not (DOCS / page).is_file()]
    unlisted = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - set(listed)
    assert {page for page in unlisted if not page.startswith("results/")} == set()


def test_the_reference_names_what_exists_and_the_whole_library():
    named = {}
    for page in sorted((DOCS / "reference").glob("*.md")):
        for identifier in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE):
            assert identifier not in named, f"{identifier} is described twice"
            named[identifier] = page.name
            module, _, name = identifier.rpartition(".")
            if importlib.util.find_spec(module) and hasattr(importlib.import_module(module), name):
                described = getattr(importlib.import_module(module), name)
            else:
                described = importlib.import_module(identifier)
            assert described.__doc__, identifier
    import entmtp

    public = {name.rpartition(".")[2] for name in named}
    assert set(entmtp.__all__) - {"__version__"} <= public
    assert {module for module, _ in COMMANDS.values()} <= {name.removeprefix("entmtp.") for name in named}


@pytest.fixture(scope="module")
def hooks(module_at):
    return module_at(DOCS / "site_hooks.py")


def test_the_configuration_page_has_every_key_with_its_default(hooks):
    text = hooks.on_page_markdown(f"# Configuration\n\n{hooks.MARK}\n")
    sections = dict(re.findall(r"^## (?:`([\w.]+)`[^\n]*|The run)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))

    def keys(section: str) -> list[str]:
        cells = re.findall(r"^\| <code>(.*?)</code> \|", section, re.MULTILINE)
        return [cell.replace("&#95;", "_") for cell in cells]

    assert keys(sections[""]) == list(Config.__dataclass_fields__)
    seen = set()
    for group, section in sections.items():
        value = Config()
        for part in filter(None, group.split(".")):
            value = getattr(value, part)
        if not isinstance(value, list):  # corpus.prompts: a list of prompt sources
            assert keys(section) == list(value.__dataclass_fields__), group
        seen.add(group)
    assert {"target", "heads.train", "corpus.prompts", "mtp", "sweep", "bank"} <= seen
    row = "| <code>shortlist</code> | <code>int</code> | <code>6</code> | trees timed live, next to the empty tree |"
    assert row in sections["bank"]
    assert "Files of `conf/decoding`: `greedy`, `sample`, `typical`." in text
    line = next(line for line in sections["confadapt"].splitlines() if "<code>lossless</code>" in line)
    assert "blocks as drafts: verified by" in line, "a comment above its key"
    assert "required" in sections["corpus.prompts"]


@pytest.mark.parametrize(
    ("html", "loads"),
    [
        ('<script src="https://unpkg.com/x.js"></script>', True),
        ("<img alt='a' src=//cdn.example/x.png>", True),
        ('<link rel="stylesheet" href="https://fonts.example/css">', True),
        ('<link href="https://fonts.example" rel="preconnect">', True),
        ('<link rel="canonical" href="https://docs.example/">', False),
        ('<script src="assets/x.js"></script><a href="https://arxiv.org/abs/2606.27550">paper</a>', False),
    ],
)
def test_a_page_that_loads_from_another_host_is_warned_about(hooks, caplog, html, loads):
    class Page:
        class file:
            src_uri = "x.md"

    assert hooks.on_post_page(html, page=Page) == html
    assert bool(caplog.records) == loads


def test_pins_of_docs_and_coverage_are_in_their_locks():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("docs", "coverage"):
        lock = {line.lower() for line in (ROOT / f"requirements-{extra}.lock").read_text().splitlines()}
        assert {pin.lower() for pin in extras[extra]} <= lock
        assert all("==" in line for line in lock if not line.startswith("#"))
    main = (ROOT / "requirements.lock").read_text().lower()
    assert "mkdocs" not in main and "coverage" not in main, "make test installs neither"


def test_what_make_builds_is_ignored_by_git():
    for path in (".venv-docs/x", ".tools/coverage/x", ".measured/data", "site/index.html"):
        assert subprocess.run(["git", "-C", str(ROOT), "check-ignore", "-q", path]).returncode == 0, path
