"""Whether a generated text gives the known answer. Texts are compared, never executed."""

import re

from entmtp.errors import EntmtpError

NUMBER = re.compile(r"[-−]?\$?\d[\d,]*(?:\.\d+)?|[-−]?\$?\.\d+")
MARK = re.compile(r"####|answer\s*(?:is|:|=)|\\boxed\{", re.IGNORECASE)


def number_in(text: str) -> str | None:
    """The last number, as a plain decimal: 1,200.50 and $1200.5 are one, 7.0 is 7."""
    found = NUMBER.findall(text)
    if not found:
        return None
    digits = found[-1].replace(",", "").replace("$", "").replace("−", "-").rstrip(".")
    whole, _, fraction = digits.partition(".")
    fraction = fraction.rstrip("0")
    sign, whole = ("-" if whole.startswith("-") else ""), whole.lstrip("-").lstrip("0") or "0"
    plain = whole + (f".{fraction}" if fraction else "")
    return plain if plain == "0" else sign + plain


def final_number(text: str) -> str | None:
    """The number that a solution ends with: after its last '####', 'answer is' or box, else the last in the text."""
    for mark in reversed(list(MARK.finditer(text))):
        first = NUMBER.search(text[mark.end() :].split("\n")[0])
        if first:
            return number_in(first.group())
    return number_in(text)


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]+|\d+", text.lower())


def correct(scoring: str, text: str, answer: str) -> bool:
    """`number`: the text's final number is the answer's. `sequence`: the answer's words or numbers come in a row,
    nothing between them. `word`: the first word is the answer."""
    if scoring == "number":
        found = final_number(text)
        return found is not None and found == final_number(answer)
    if scoring == "sequence":
        said, wanted = words_of(text), words_of(answer)
        starts = [i for i in range(len(said) - len(wanted) + 1) if said[i : i + len(wanted)] == wanted]
        # counting that goes on past its end is wrong; a sentence that follows is not
        return any(not "".join(said[i + len(wanted) :][:1]).isdigit() for i in starts)
    if scoring == "word":
        return words_of(answer)[-1:] == [word for word in words_of(text) if word not in ("a", "an", "the")][:1]
    raise EntmtpError(f"task.scoring={scoring}: choose one of number, sequence, word")
