"""What the HTML pages share: templates, inlined style and scripts, captions. A page loads nothing from outside."""

import base64
import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from entmtp.config import shipped
from entmtp.errors import EntmtpError
from entmtp.io import write_text

PAGES = Path(__file__).with_name("pages")
CAPTIONS = shipped("captions", "workflow/report")


def read_captions(names: list[str]) -> dict[str, str]:
    """Captions of figures and tables, from workflow/report/<name>.rst. Raises EntmtpError for a missing one."""
    captions = {}
    for name in names:
        path = CAPTIONS / f"{name}.rst"
        if not path.exists():
            raise EntmtpError(f"{path}: no such file; every figure and table has a caption")
        # plain text; ``literal`` marks of reStructuredText are for Snakemake's own report
        captions[name] = " ".join(path.read_text(encoding="utf-8").replace("``", "").split())
    return captions


def write_page(path: str | Path, template: str, **values: Any) -> None:
    """Render `pages/<template>`. Every value goes through Jinja's autoescape; an unknown one is an error."""
    environment = Environment(
        loader=FileSystemLoader(PAGES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    write_text(path, environment.get_template(template).render(asset=asset, **values))


def asset(name: str) -> Markup:
    """A style sheet or script of ours, as it is."""
    return Markup((PAGES / name).read_text(encoding="utf-8"))


def json_block(value: Any) -> Markup:
    """JSON for a `<script type="application/json">`: no text in it can end the element or begin a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def embedded(png: str | Path) -> dict[str, Any]:
    """A PNG as {"src": data URI, "width": its inches in CSS pixels}: all figures then share one text size."""
    from PIL import Image

    try:
        data = Path(png).read_bytes()
        with Image.open(png) as image:
            width = round(96 * image.width / image.info.get("dpi", (96, 96))[0])
    except OSError as error:
        raise EntmtpError(f"{png}: no such figure or not a PNG ({error})") from error
    return {"src": "data:image/png;base64," + base64.b64encode(data).decode(), "width": width}
