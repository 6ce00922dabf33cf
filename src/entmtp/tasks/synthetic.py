"""Short tasks with right answers, generated from a seed: what a small model can do well, so that a loss would show."""

import random
from collections.abc import Callable, Iterator

from entmtp.errors import EntmtpError

WORDS = """
    apple river stone cloud lamp tiger paper silver garden window bread candle forest pencil ocean button mirror ladder
    rabbit bottle carpet dragon engine feather guitar hammer island jacket kettle lemon magnet needle orange piano quilt
    rocket saddle ticket umbrella violin whistle yellow zebra anchor basket copper desert eagle flower glove
""".split()  # noqa: SIM905
NAMES = "Anna Ben Clara David Emma Felix Grace Henry Irene Jack Karen Leo Maria Noah Olga Paul".split()  # noqa: SIM905


def _arithmetic(draw: random.Random) -> tuple[str, str]:
    a, b = draw.randint(2, 60), draw.randint(2, 39)
    if draw.random() < 0.5:
        return f"What is {a} + {b}? Answer with the number only.", str(a + b)
    return f"What is {a + b} - {b}? Answer with the number only.", str(a)


def _counting(draw: random.Random) -> tuple[str, str]:
    first, count = draw.randint(1, 40), draw.randint(8, 20)
    numbers = [str(n) for n in range(first, first + count)]
    return f"Count from {numbers[0]} to {numbers[-1]}. Write only the numbers, separated by commas.", ", ".join(numbers)


def _copying(draw: random.Random) -> tuple[str, str]:
    words = draw.sample(WORDS, draw.randint(5, 9))
    old, new = draw.choice(words), draw.choice([word for word in WORDS if word not in words])
    changed = " ".join(new if word == old else word for word in words)
    return f'Repeat this, with the word "{new}" in place of "{old}": {" ".join(words)}', changed


def _repetition(draw: random.Random) -> tuple[str, str]:
    phrase, times = " ".join(draw.sample(WORDS, draw.randint(3, 5))), draw.randint(4, 8)
    return f'Write "{phrase}" {times} times, one on each line, and nothing else.', " ".join([phrase] * times)


def _extraction(draw: random.Random) -> tuple[str, str]:
    people = draw.sample(NAMES, 3)
    things, places = draw.sample(WORDS, 3), draw.sample(WORDS, 3)
    lines = [f"{who} keeps a {what} near the {where}." for who, what, where in zip(people, things, places, strict=True)]
    asked = draw.randrange(3)
    return f"{' '.join(lines)} What does {people[asked]} keep? Answer with one word.", things[asked]


KINDS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "arithmetic": _arithmetic, "counting": _counting, "copying": _copying, "extraction": _extraction,
    "repetition": _repetition,
}  # fmt: skip


def generate(kind: str, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """`count` different (question, answer) pairs at most; the same seed gives the same ones in the same order."""
    if kind not in KINDS:
        raise EntmtpError(f"task.subset={kind}: unknown kind of generated task; choose one of {', '.join(KINDS)}")
    draw, seen = random.Random(f"{kind}/{seed}"), set()
    for _ in range(20 * count):
        question, answer = KINDS[kind](draw)
        if question not in seen:
            seen.add(question)
            yield question, answer
        if len(seen) == count:
            return
