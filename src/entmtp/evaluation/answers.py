"""Whether a generated text gives the known answer. Texts are compared; only `code` is executed, in the sandbox."""

import re
from fractions import Fraction
from typing import TYPE_CHECKING

from entmtp.errors import EntmtpError

if TYPE_CHECKING:
    from entmtp.evaluation.code import Problem

SIGN = r"(?<![\w.)\]])[-−–]"  # 10-7 and 3–4 hold no negative number
MONEY = r"[$€£¥]"
WHOLE = r"\d{1,3}(?:,\d{3})+(?!\d)|\d+"
NUMBER = re.compile(
    rf"(?P<sign>(?:{SIGN})?)(?:{MONEY}[ ]?(?P<inner>-?))?"
    rf"(?:(?P<mixed>\d{{1,9}})[ ]+(?=\d{{1,9}}/[1-9]))?"
    rf"(?P<whole>{WHOLE}|(?=\.\d))(?P<decimals>(?:\.\d+)?)(?P<power>(?:[eE][+-]?\d{{1,2}}(?!\w))?)"
    rf"(?:[ ]?/[ ]?(?P<denominator>[1-9]\d*)(?!\d|\.\d))?",
    re.ASCII,
)
MARK = re.compile(r"####|answer\s*(?:is|:|=)|\\boxed\s*(?=\{)", re.IGNORECASE)
LATEX = [
    (re.compile(r"(\d)\s*\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}"), r"\1 \2/\3"),  # a mixed number
    (re.compile(r"\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}"), r"\1/\2"),
    (re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)"), r"\1/\2"),  # of two digits, without braces
    (re.compile(r"\\!|\\(?=[$%])"), ""),
    (re.compile(r"(?<=\d)(?:\{,\}|\\,)(?=\d{3})"), ","),  # thousands
]
LONGEST = 300  # digits: more is no answer, and slow to compare
WORKING = re.compile(r"\b(?:because|since|as|so)\b", re.IGNORECASE)
ASIDE = re.compile(r"\([^()]*(?:\)|$)")
# a number with its unit, of which nothing is computed: 18, $2, 12 eggs, "he has 5 apples left"
STANDS_ALONE = re.compile(rf"[^\d=+*/×÷^\\]*(?:{NUMBER.pattern})(?:\s+[^\W\d]+\b)*\s*[,$%]?\s*", re.ASCII)
REACH = 500  # characters after a mark that are looked at


def final_number(text: str) -> str | None:
    """The number that a solution ends with: after its last '####', 'answer is' or box, else the last in the text.

    As a plain decimal, or as a fraction in lowest terms: 1,200.50 and $1200.5 are one, so are 7.0 and 7, and 3/4 and
    .75. Percent and units are not looked at; numbers in words are none.
    """
    for pattern, plain in LATEX:
        text = pattern.sub(plain, text)
    for mark in reversed(list(MARK.finditer(text))):
        said = _said_after(text, mark)
        found = next((number for number in map(_plain, NUMBER.finditer(said)) if number), None)
        if found:
            return found
    numbers = [number for number in map(_plain, NUMBER.finditer(text)) if number]
    return numbers[-1] if numbers else None


def _said_after(text: str, mark: re.Match) -> str:
    """A box's content; else the rest of the mark's sentence, or the next line if that is but a number.

    What comes before a last '=' is working, unless it is a number alone (36 = 6^2). So is what stands in parentheses,
    or after a reason's first word, behind a number of which nothing is computed.
    """
    rest = text[mark.end() : mark.end() + REACH]
    if mark.group().lower().startswith("\\boxed"):
        said = _braced(rest)
    else:
        said, _, below = rest.partition("\n")
        if not re.search(r"\w", said):
            said = next((line for line in below.split("\n") if re.search(r"\w", line)), "")
            said = "" if re.search(r"[A-Za-z]", said) else said
        said = re.split(r"[.;!?](?:\s|$)", said, maxsplit=1)[0]
        before = WORKING.split(said, maxsplit=1)[0]
        said = before if STANDS_ALONE.fullmatch(before) else said
        bare = ASIDE.sub(" ", said)
        said = bare if "=" not in bare and NUMBER.search(bare) else said
    first, _, _ = said.partition("=")
    if NUMBER.fullmatch(first.strip(" $*:")):
        return first
    return said.rsplit("=", 1)[-1] if NUMBER.search(said.rsplit("=", 1)[-1]) else said


def _braced(rest: str) -> str:
    """What stands in the braces that `rest` begins with; all of it where they are not closed."""
    start, depth = rest.index("{") + 1, 0
    for place, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "}" and depth == 0:
            return rest[start:place]
    return rest[start:]


def _plain(found: re.Match) -> str | None:
    parts = found.groupdict()
    if len(found.group()) > LONGEST:
        return None
    value = Fraction((parts["whole"].replace(",", "") or "0") + parts["decimals"] + parts["power"])
    if parts["denominator"]:
        value /= int(parts["denominator"])
        value += int(parts["mixed"] or 0)
    return _decimal(-value if parts["sign"] or parts["inner"] else value)


def _decimal(value: Fraction) -> str:
    """Exact digits where they end, else the fraction: 7, -0.75, 1/3."""
    rest, places = value.denominator, 0
    for factor in (2, 5):
        count = 0
        while rest % factor == 0:
            rest, count = rest // factor, count + 1
        places = max(places, count)
    if rest > 1:
        return f"{value.numerator}/{value.denominator}"
    digits = str(abs(value.numerator) * 10**places // value.denominator).zfill(places + 1)
    sign = "-" if value < 0 else ""
    return sign + (f"{digits[:-places]}.{digits[-places:]}" if places else digits)


def words_of(text: str, digits: bool = False) -> list[str]:
    """Words of any script, and numbers with their sign, thousands and decimals, whatever stands between them. With
    `digits` runs of digits alone: 100,101,102 are three numbers."""
    if digits:
        return re.findall(r"[^\W\d_]+|\d+", text.casefold())
    found = re.findall(rf"[^\W\d_]+|(?:{SIGN})?(?:{WHOLE})(?:\.\d+)?", text.casefold())
    return [re.sub(r"\.0+$", "", word.replace(",", "").replace("–", "-")) for word in found]


def correct(scoring: str, text: str, answer: "str | Problem") -> bool:
    """`number`: the text's final number is the answer's. `begins`: the text begins with the answer's words or numbers.
    `contains`: they come in a row, nothing between them. `sequence`: so do they, and not once more. `code`: the text's
    program passes the problem's tests, executed in the sandbox."""
    if scoring == "number":
        found, right = final_number(text), final_number(answer)
        if right is None:
            raise EntmtpError(f"task.scoring=number: the answer {answer!r:.60} has no number")
        return found == right
    if scoring == "code":
        from entmtp.evaluation.code import verdict

        return verdict(text, answer).passed
    digits = sum(word[-1].isdigit() for word in words_of(answer)) > 1  # a list of numbers, whose commas part them
    said, wanted = words_of(text, digits), words_of(answer, digits)
    if not wanted:
        raise EntmtpError(f"task.scoring={scoring}: the answer {answer!r:.60} has no word and no number")
    if scoring == "begins":
        return said[: len(wanted)] == wanted
    if scoring in ("contains", "sequence"):
        starts = [i for i in range(len(said) - len(wanted) + 1) if said[i : i + len(wanted)] == wanted]
        if scoring == "contains":
            return bool(starts)
        # a phrase said too often is wrong: the answer fits in at several places that overlap
        return any(not any(0 < abs(i - other) < len(wanted) for other in starts) for i in starts)
    raise EntmtpError(f"task.scoring={scoring}: choose one of number, begins, contains, sequence, code")
