"""How to cite a run: BibTeX from CITATION.cff, with the commit that made it."""

from typing import Any

import yaml

from entmtp.config import shipped
from entmtp.errors import EntmtpError

CFF = shipped("CITATION.cff", "CITATION.cff")


def read_citation() -> dict[str, Any]:
    try:
        return yaml.safe_load(CFF.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise EntmtpError(f"{CFF}: not a readable citation file ({error})") from error


def bibtex(cff: dict[str, Any], commit: str | None) -> str:
    """The software, then the papers whose methods it implements."""
    note = [f"  note = {{commit {commit}}},"] if commit else []
    entries = [
        [
            "@software{entmtp,",
            f"  title = {{{cff['title']}}},",
            f"  author = {{{_authors(cff)}}},",
            f"  version = {{{cff['version']}}},",
            *note,
            "}",
        ]
    ]
    for reference in cff["references"]:
        number = reference["url"].rsplit("/", 1)[-1]
        entries.append(
            [
                f"@article{{arxiv{number.replace('.', '')},",
                f"  title = {{{reference['title']}}},",
                f"  author = {{{_authors(reference)}}},",
                f"  url = {{{reference['url']}}},",
                "}",
            ]
        )
    return "\n\n".join("\n".join(entry) for entry in entries)


def _authors(entry: dict[str, Any]) -> str:
    """Doubled braces keep BibTeX from taking a group's name apart."""
    return " and ".join(f"{{{author['name']}}}" for author in entry["authors"])
