"""A page as a tree of elements, for tests that read HTML without a browser."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "img", "link", "input", "br"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    children: list["Element | str"] = field(default_factory=list)

    def __iter__(self) -> Iterator["Element"]:
        """This element and all below it, in document order."""
        yield self
        for child in self.children:
            if isinstance(child, Element):
                yield from child

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    @property
    def classes(self) -> list[str]:
        return (self.attributes.get("class") or "").split()

    def all(self, tag: str, name: str | None = None) -> list["Element"]:
        """Elements below with a tag, of a class where one is named."""
        return [one for one in self if one is not self and one.tag == tag and (not name or name in one.classes)]

    def id(self, name: str) -> "Element":
        found = [one for one in self if one.attributes.get("id") == name]
        assert len(found) == 1, f"{len(found)} elements with id {name}"
        return found[0]


class Page(HTMLParser):
    """Fails on elements that are not closed, or not in order."""

    def __init__(self, text: str):
        super().__init__()
        self.root = Element("document", {})
        self.open = [self.root]
        self.feed(text)
        self.close()
        assert self.open == [self.root], [one.tag for one in self.open]

    def handle_starttag(self, tag, attrs):
        element = Element(tag, dict(attrs))
        assert len(element.attributes) == len(attrs), f"an attribute twice: {attrs}"
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop().tag == tag, tag

    def handle_data(self, data):
        self.open[-1].children.append(data)


def addresses(root: Element) -> list[str]:
    """Everything that a browser might load or go to."""
    names = ("src", "href", "srcset", "data", "action", "poster", "formaction")
    return [value for one in root for name, value in one.attributes.items() if name in names]
