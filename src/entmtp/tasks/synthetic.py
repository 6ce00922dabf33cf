"""Short tasks with right answers, generated from a seed: what a small model can do well, so that a loss would show.

A small chat model does most of them only after it has seen how: the chat then begins with examples of the same kind.
"""

import random
from collections.abc import Callable, Iterator

from entmtp.errors import EntmtpError

WORDS = """
    apple river stone cloud lamp tiger paper silver garden window bread candle forest pencil ocean button mirror ladder
    rabbit bottle carpet dragon engine feather guitar hammer island jacket kettle lemon magnet needle orange piano quilt
    rocket saddle ticket umbrella violin whistle yellow zebra anchor basket copper desert eagle flower glove
""".split()  # noqa: SIM905
NAMES = "Anna Ben Clara David Emma Felix Grace Henry Irene Jack Karen Leo Maria Noah Olga Paul".split()  # noqa: SIM905


COUNTED = 16  # numbers


def _arithmetic(draw: random.Random) -> tuple[str, str, str]:
    a, b = draw.randint(1, 20), draw.randint(1, 9)
    if draw.random() < 0.5:
        return f"What is {a} + {b}?", f"{a} + {b} = {a + b}", str(a + b)
    return f"What is {a + b} - {b}?", f"{a + b} - {b} = {a}", str(a)


def _counting(draw: random.Random) -> tuple[str, str, str]:
    first = draw.randint(1, 400)
    numbers = ", ".join(str(n) for n in range(first, first + COUNTED))
    return f"Count on from {first}.", numbers, numbers


def _copying(draw: random.Random) -> tuple[str, str, str]:
    words = " ".join(draw.sample(WORDS, draw.randint(4, 7)))
    return f'Repeat, and end with "done": {words}', f"{words} done", f"{words} done"


def _repetition(draw: random.Random) -> tuple[str, str, str]:
    phrase, times = " ".join(draw.sample(WORDS, draw.randint(3, 4))), draw.randint(3, 6)
    return f'Write "{phrase}" {times} times.', "\n".join([phrase] * times), " ".join([phrase] * times)


def _extraction(draw: random.Random) -> tuple[str, str, str]:
    who, age, (thing, place) = draw.choice(NAMES), draw.randint(20, 70), draw.sample(WORDS, 2)
    passage = f"{who} is {age} years old and works in a shop near the {place}. {who} sells a {thing} every day."
    asked = {"What is the name of this person?": who, "How old is this person?": str(age),
             "What does this person sell?": thing}  # fmt: skip
    question = draw.choice(list(asked))
    return f"{passage}\n\n{question}", asked[question], asked[question]


# (question, how an assistant says the answer, the answer as it is judged), and how many examples come first
KINDS: dict[str, tuple[Callable[[random.Random], tuple[str, str, str]], int]] = {
    "arithmetic": (_arithmetic, 2),
    "counting": (_counting, 2),
    "copying": (_copying, 2),
    "repetition": (_repetition, 2),
    "extraction": (_extraction, 0),
}


def generate(kind: str, count: int, seed: int) -> Iterator[tuple[list[tuple[str, str]], str, str]]:
    """`count` different (examples, question, answer) at most, an example being (question, answer in words); the same
    seed gives the same ones in the same order."""
    if kind not in KINDS:
        raise EntmtpError(f"task.subset={kind}: unknown kind of generated task; choose one of {', '.join(KINDS)}")
    make, shots = KINDS[kind]
    draw, seen = random.Random(f"{kind}/{seed}"), set()
    for _ in range(20 * count):
        question, _said, answer = make(draw)
        examples = [make(draw)[:2] for _ in range(shots)]
        if question not in seen and question not in dict(examples):
            seen.add(question)
            yield examples, question, answer
        if len(seen) == count:
            return
