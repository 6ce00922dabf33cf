"""Numbers as models and GSM8K write them: every form gives the one plain number, or none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entmtp.evaluation.answers import correct, final_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        # thousands, currency, trailing marks
        ("It costs $1,234,567.89.", "1234567.89"),
        ("She saved €5.", "5"),
        ("He has £ 12 left", "12"),
        ("The answer is \\$18.", "18"),
        ("a total of 1,2,3", "3"),
        ("pages 10,20", "20"),
        ("5$", "5"),
        ("**42**", "42"),
        ("(42).", "42"),
        ("42...", "42"),
        ("It is 3.50!", "3.5"),
        # signs
        ("-5", "-5"),
        ("a change of -$5.25", "-5.25"),
        ("a change of $-5", "-5"),
        ("–5 degrees", "-5"),
        ("10-7", "7"),
        ("between 3-4", "4"),
        ("pages 3–4", "4"),
        ("COVID-19", "19"),
        ("(2)-1", "1"),
        # decimals equal to integers
        ("7.0", "7"),
        ("7.000 apples", "7"),
        ("0.0", "0"),
        ("-0.0", "0"),
        ("1e3", "1000"),
        ("2.5e-1", "0.25"),
        # percent and units: the number itself
        ("So 25% of them", "25"),
        ("25 \\%", "25"),
        ("he ran 5km", "5"),
        ("12.5 percent", "12.5"),
        # fractions and mixed numbers
        ("3/4", "0.75"),
        ("1/3 of it", "1/3"),
        ("2/6 of it", "1/3"),
        ("10/2", "5"),
        ("2 1/2 cups", "2.5"),
        ("\\frac{3}{4}", "0.75"),
        ("-\\frac{1}{3}", "-1/3"),
        ("2\\frac{1}{2}", "2.5"),
        ("5/0", "0"),
        # LaTeX
        ("\\boxed{17}", "17"),
        ("$\\boxed{1{,}234}$", "1234"),
        ("\\boxed{1,\\!234}", "1234"),
        ("\\boxed{\\$1,234.50}", "1234.5"),
        ("\\boxed{\\text{17 apples}} and 3 more", "17"),
        ("\\boxed{x_1 = 17}", "17"),
        ("\\boxed{\\dfrac{7}{2}} from 9", "3.5"),
        ("\\boxed {5} 6", "5"),
        ("\\boxed{5", "5"),
        ("\\(42\\)", "42"),
        # marks
        ("#### 72", "72"),
        ("####72", "72"),
        ("#### $1,080", "1080"),
        ("#### -3 degrees", "-3"),
        ("####\n12", "12"),
        ("#### 5\n#### 6", "6"),
        ("Answer: 5\nExplanation: 2+3", "5"),
        ("**Answer:** 5 apples of 9", "5"),
        ("The final answer is:\n\n**42**\n", "42"),
        ("The answer is 3 + 4 = 7.", "7"),
        ("The answer is 3 * (4 + 1) = 15 dollars", "15"),
        ("The answer is 5. Check: 9 - 4 = 5, and 10 is more", "5"),
        ("Let us find the answer:\n1. He has 3.\n2. He gets 4, so 7", "7"),
        ("The answer is 18 dollars per day, for 9 eggs", "18"),
        ("\\boxed{17}. So the answer is in dollars.", "17"),
        ("the answer is seven", None),
        ("She sold 48/2 = 24 clips in May, 48+24 = 72 altogether", "72"),
        ("<<48+24=72>>72", "72"),
        # none, or no sensible one
        ("seven", None),
        ("...", None),
        ("$", None),
        ("-", None),
        ("1" * 5000, None),
        ("5, not " + "9" * 400, "5"),
        ("٣", None),
    ],
)
def test_the_number(text, number):
    assert final_number(text) == number


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("so she makes $18.00 every day", "Janet sells 9 duck eggs.\nShe makes 9 * 2 = $<<9*2=18>>18.\n#### 18", True),
        ("so it is 0.5", "#### 1/2", True),
        ("so it is .333", "#### 1/3", False),
        ("so it is 1000", "#### 1,000", True),
        ("so it is -1000", "#### 1,000", False),
        ("no idea", "#### 1,000", False),
        ("no idea", "7", False),
    ],
)
def test_gsm8k_answers(text, answer, right):
    assert correct("number", text, answer) is right


FRAMES = ["{}", "#### {}", "The answer is {}.", "= {}!"]


@given(st.integers(-(10**12), 10**12), st.integers(0, 3), st.sampled_from(FRAMES))
def test_every_way_of_writing_a_number_is_the_same_number(whole, zeros, frame):
    plain = str(whole)
    decimals = "." + "0" * zeros if zeros else ""
    for written in (plain, f"{whole:,}", f"{whole:,}{decimals}", f"{plain}{decimals}"):
        assert final_number(f"Of 3 things: {frame.format(written)}") == plain


@given(st.text(alphabet="0123456789.,-/ $=#\\{}abcexboxedfracanswer is\n", max_size=60))
def test_any_text_gives_a_plain_number_or_none(text):
    found = final_number(text)
    if found is not None:
        assert final_number(found) == found, "what comes out is read back as itself"


@pytest.mark.parametrize(
    ("part", "number"), [("1,", "1"), ("1 ", "1"), ("answer is ", None), ("\\boxed{", None), ("1/", "1"), ("-$", None)]
)
def test_long_texts_are_read_too(part, number):
    assert final_number(part * 2000) == number
