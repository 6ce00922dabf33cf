"""What `make docs` adds to MkDocs: the configuration's reference, made from its source, and a check of built pages.

Standard library only: MkDocs runs in an environment without entmtp's dependencies.
"""

import ast
import html
import logging
import re
import tokenize
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARK = "<!-- configuration -->"
# a page that loads anything from elsewhere: a script, a picture, a style sheet (links that a reader follows are not)
FOREIGN = re.compile(r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//[^"'\s>]+"""
                     r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preconnect|preload))[^>]*"""
                     r"""\bhref=["']?(?:https?:)?//[^"'\s>]+""")  # fmt: skip

log = logging.getLogger("mkdocs.hooks.site")  # its warnings are errors in strict mode


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    return markdown.replace(MARK, Settings(ROOT).markdown()) if MARK in markdown else markdown


def on_post_page(output: str, page: Any, **kwargs: Any) -> str:
    for found in FOREIGN.findall(output):
        log.warning("%s loads from another host: %s", page.file.src_uri, found)
    return output


class Settings:
    """The dataclasses of `entmtp.settings`, read without importing them."""

    def __init__(self, root: Path):
        self.conf, source = root / "conf", root / "src/entmtp/settings.py"
        body = ast.parse(source.read_text(encoding="utf-8")).body
        self.classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
        self.ends: dict[int, str] = {}  # comments behind code, by line
        self.lines: dict[int, str] = {}  # lines that are a comment
        with source.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type == tokenize.COMMENT:
                    kind = self.lines if token.line.lstrip().startswith("#") else self.ends
                    kind[token.start[0]] = token.string.lstrip("# ")

    def markdown(self) -> str:
        """A section for the run's own keys and one for each group of conf/, a row per key."""
        parts, seen = [], set()
        for key, kind in [("", "Config"), *self.nested("Config")]:
            if kind in seen:
                continue
            seen.add(kind)
            names = sorted(path.stem for path in (self.conf / key).glob("*.yaml")) if key else []
            parts += [
                f"## `{key}` {{ #{key} }}" if key else "## The run",
                ast.get_docstring(self.classes[kind]) or "",
                f"Files of `conf/{key}`: {', '.join(f'`{name}`' for name in names)}." if names else "",
                self.table(kind),
            ]
        return "\n\n".join(part for part in parts if part)

    def nested(self, kind: str, prefix: str = "") -> list[tuple[str, str]]:
        """(dotted key, class) of every field that is a dataclass, or a list of them."""
        found = []
        for field in self.fields(kind):
            inner = [name.id for name in ast.walk(field.annotation) if getattr(name, "id", "") in self.classes]
            for name in inner:
                key = f"{prefix}{field.target.id}"
                found += [(key, name), *self.nested(name, f"{key}.")]
        return found

    def fields(self, kind: str) -> list[ast.AnnAssign]:
        """In order, those of a base class first; a field that is given again stands where it first stood."""
        node = self.classes[kind]
        listed = [field for base in node.bases for field in self.fields(base.id)]
        listed += [field for field in node.body if isinstance(field, ast.AnnAssign)]
        return list({field.target.id: field for field in listed}.values())

    def table(self, kind: str) -> str:
        rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        for field in self.fields(kind):
            cells = [code(field.target.id), code(ast.unparse(field.annotation)), self.default(field.value)]
            rows.append(f"| {' | '.join([*cells, plain(self.meaning(field))])} |")
        return "\n".join(rows)

    def default(self, value: ast.expr | None) -> str:
        if value is None or getattr(value, "id", "") == "MISSING":
            return "required"
        if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "field"):
            return code(ast.unparse(value))
        factory = next(keyword.value for keyword in value.keywords if keyword.arg == "default_factory")
        if isinstance(factory, ast.Lambda):
            return code(ast.unparse(factory.body))
        name = ast.unparse(factory)
        return "see below" if name in self.classes else code({"list": "[]", "dict": "{}"}[name])

    def meaning(self, field: ast.AnnAssign) -> str:
        """The comment behind the field, or the lines of comment right above it."""
        if field.end_lineno in self.ends:
            return self.ends[field.end_lineno]
        lines, line = [], field.lineno - 1
        while line in self.lines:
            lines.insert(0, self.lines[line])
            line -= 1
        return " ".join(lines)


def code(text: str) -> str:
    return f"<code>{plain(text)}</code>"


def plain(text: str) -> str:
    """Text that neither Markdown nor a table takes for its own."""
    return re.sub(r"[|_*`\[\]{}~]", lambda found: f"&#{ord(found.group())};", html.escape(text, quote=False))
