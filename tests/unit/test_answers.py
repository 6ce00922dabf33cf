"""Answers of tricky formats, and generated tasks whose own answers must be right by the same scoring."""

import re

import pytest

from entmtp.config import TaskConfig, compose
from entmtp.errors import EntmtpError
from entmtp.evaluation.answers import correct, final_number
from entmtp.tasks.sources import load_source
from entmtp.tasks.synthetic import KINDS, generate


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", "42"),
        ("She has 3 apples and 4 pears.\n#### 7", "7"),
        ("#### 1,234", "1234"),
        ("So the total is $1,200.50", "1200.5"),
        ("The answer is: $18.00 per day", "18"),
        ("x = 5, so the answer is 5 apples, not 6 pears", "5"),
        ("First the answer is 3. Wait, the answer is 4.", "4"),
        (r"Thus \boxed{17} follows from 9 and 8.", "17"),
        ("It fell to -12 degrees", "-12"),
        ("minus: −7", "-7"),
        ("0.50 + .25 = .75", "0.75"),
        ("007", "7"),
        ("-0", "0"),
        ("1,000,000", "1000000"),
        ("no number here", None),
        ("", None),
        ("The answer is unknown, maybe 9", "9"),
        ("The answer is 2 hours (1 hour = 60 minutes).", "2"),
        ("Final answer: 18 (9 eggs x $2 = 18, 4 + 3 = 7 eggs used)", "18"),
        ("The answer is 15 because 3 x 5 = 15, so x = 3.", "15"),
        ("The answer is 36 = 6^2", "36"),
        ("The answer is 6*6 = 36", "36"),
        ("The answer is 20% of 50 = 10", "10"),
        ("The answer is $18 - $3 = $15.", "15"),
        ("Answer: 2x = 10", "10"),
        ("The answer is (5)", "5"),
        (r"The answer is $3 \times (4+5) = 27$.", "27"),
        ("Answer: 2(3 + 4) = 14", "14"),
        ("Answer: 3 (apples) + 4 (oranges) = 7", "7"),
        ("Answer: The cost of 3 shirts = $45.", "45"),
        (r"\boxed{\sqrt{16} = 4}", "4"),
        (r"\boxed{x_{1} = 5}", "5"),
        ("The answer is P(3) = 0.25", "0.25"),
        ("The answer is 3 dozen = 36", "36"),
        (r"The answer is \frac12", "0.5"),
    ],
)
def test_the_final_number(text, number):
    assert final_number(text) == number


@pytest.mark.parametrize(
    ("scoring", "text", "answer", "right"),
    [
        ("number", "2 + 2 = 4", "4", True),
        ("number", "2 + 2 = 4.0", "#### 4", True),
        ("number", "4 - 2 = 2", "4", False),
        ("number", "", "4", False),
        ("sequence", "1, 2, 3", "1, 2, 3", True),
        ("sequence", "Sure: 1,2,3.", "1, 2, 3", True),
        ("sequence", "1, 2, 3, 4", "1, 2, 3", True),
        ("begins", "1, 2, 3, 4", "1, 2, 3", True),
        ("begins", "So: 1, 2, 3", "1, 2, 3", False),
        ("begins", "1, 2", "1, 2, 3", False),
        ("sequence", "1, 3", "1, 2, 3", False),
        ("sequence", "Here it is: red green BLUE", "red green blue", True),
        ("sequence", "red green", "red green blue", False),
        ("contains", "Candle.", "candle", True),
        ("contains", "Emma is 24 years old.", "24", True),
        ("contains", "Emma is 2 4 years old.", "24", False),
        ("contains", "candles", "candle", False),
        ("contains", "", "candle", False),
        ("contains", "Sie wohnt in München.", "MÜNCHEN", True),
        ("contains", "Она живёт в Москве", "Москва", False),
        ("begins", "東京、日本", "東京", True),
        ("begins", "大阪", "東京", False),
        ("number", "She ate 3/4.", "0.75", True),
        ("contains", "It is 1,234 km away.", "234", False),
        ("contains", "It is 1,234 km away.", "1234", True),
        ("contains", "It fell to -5", "5", False),
        ("contains", "From 3-5 people", "5", True),
        ("begins", "12.5", "12", False),
        ("contains", "It is 12,345.6", "345.6", False),
        ("contains", "It is 1234 km", "1,234", True),
        ("contains", "It fell to -0.75", "0.75", False),
        ("contains", "It costs $5.00", "5", True),
        ("begins", "100,101,102", "100, 101", True),
        ("sequence", "100,101,102", "100, 101, 102", True),
    ],
)
def test_scoring(scoring, text, answer, right):
    assert correct(scoring, text, answer) is right


@pytest.mark.parametrize(
    ("scoring", "answer", "said"),
    [("number", "none", "has no number"), ("contains", "!?", "no word and no number"), ("begins", "", "no word")],
)
def test_an_answer_that_says_nothing_is_no_answer(scoring, answer, said):
    """Otherwise every text, or none, would be right."""
    with pytest.raises(EntmtpError, match=said):
        correct(scoring, "any text 5", answer)


def test_unknown_scoring_is_named():
    with pytest.raises(EntmtpError, match=r"task\.scoring=vibes"):
        correct("vibes", "a", "b")


SCORING = {"arithmetic": "number", "counting": "begins", "extraction": "contains"}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_generated_tasks_are_seeded_different_and_right(kind):
    rows = list(generate(kind, 60, 1))
    assert rows == list(generate(kind, 60, 1))
    assert len({question for _, question, _ in rows}) == 60
    assert {question for _, question, _ in generate(kind, 60, 2)} != {question for _, question, _ in rows}
    scoring = SCORING.get(kind, "sequence")
    assert compose([f"task={kind}"]).task.scoring == scoring
    for examples, question, answer in rows:
        assert len(examples) == KINDS[kind][1] and question not in dict(examples)
        assert correct(scoring, answer, answer)
        if kind == "arithmetic":
            a, sign, b = re.search(r"(\d+) ([+-]) (\d+)", question).groups()
            assert int(answer) == (int(a) + int(b) if sign == "+" else int(a) - int(b)) > 0
            assert all(eval_sum(said) for _, said in examples)
        if kind == "counting":
            first = int(re.search(r"from (\d+)", question).group(1))
            assert answer == ", ".join(map(str, range(first, first + 16)))
        if kind == "copying":
            assert answer.split() == [*re.search(r": (.*)", question).group(1).split(), "done"]
        if kind == "repetition":
            phrase, times = re.search(r'"(.+)" (\d+) times', question).groups()
            assert answer == " ".join([phrase] * int(times)) and correct("sequence", f"{phrase}\n" * int(times), answer)
            for wrong in (int(times) - 1, int(times) + 1):
                assert not correct("sequence", f"{phrase}\n" * wrong, answer)
        if kind == "extraction":
            assert re.search(rf"\b{answer}\b", question.split("\n\n")[0])


def eval_sum(said: str) -> bool:
    a, sign, b, c = re.fullmatch(r"(\d+) ([+-]) (\d+) = (\d+)", said).groups()
    return int(c) == (int(a) + int(b) if sign == "+" else int(a) - int(b))


def test_generated_tasks_are_a_source(tmp_path):
    config = TaskConfig(name="t", source="synthetic", subset="counting", calib=3, test=2)
    rows = list(load_source(config, tmp_path))
    assert len(rows) == 20 and all(correct("begins", row["answer"], row["answer"]) for row in rows)
    assert [turn["role"] for turn in rows[0]["messages"]] == ["user", "assistant", "user", "assistant", "user"]
    assert len({row["id"] for row in rows}) == 20
    with pytest.raises(EntmtpError, match=r"task\.subset=nothing.*arithmetic"):
        list(load_source(TaskConfig(name="t", source="synthetic", subset="nothing"), tmp_path))
