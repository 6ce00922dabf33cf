"""Programs out of chat answers, and whether they pass HumanEval's tests (Chen et al., 2021, arXiv:2107.03374).

Nothing here executes anything: `compile` only parses. `verdict` hands the program to the sandbox.
"""

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from textwrap import dedent, indent

from entmtp.config import TaskConfig
from entmtp.errors import EntmtpError
from entmtp.evaluation.sandbox import Outcome, run
from entmtp.tasks.sources import humaneval_problems

# a block up to the fence that stands alone at the opening one's margin: a docstring within may hold fences of its own
MARGINED = re.compile(
    r"^(?P<margin>[ \t]*)(?P<fence>```|~~~)[^\n`]*\n(?P<code>.*?)^(?P=margin)(?P=fence)[ \t]*$",
    re.DOTALL | re.MULTILINE,
)
FENCED = re.compile(r"(?:```|~~~)[^\n`]*\n(.*?)(?:```|~~~|\Z)", re.DOTALL)
FENCE = re.compile(r"```|~~~")
BEGINNING = re.compile(r"(?:import|def|async def|class) +\w|from +\S+ +import\b|@\w")
GOES_ON = re.compile(r"[\s#)\]}]|if __name__|print\(|assert ")  # code may go on with it, sentences do not


@dataclass(frozen=True)
class Problem:
    """One HumanEval problem: `prompt` ends in an open function, `test` defines check(candidate)."""

    prompt: str
    entry_point: str
    test: str


def load_problems(config: TaskConfig, resources: str | Path) -> dict[str, Problem]:
    """Problems by prompt id, from the same pinned wheel as the prompts. Raises EntmtpError for other sources."""
    if config.source != "humaneval":
        raise EntmtpError(
            f"task.scoring=code (task {config.name}): tests are known for task.source=humaneval only, not "
            f"{config.source}"
        )
    return {name: Problem(**parts) for name, parts in humaneval_problems(config, Path(resources)).items()}


@lru_cache(maxsize=4096)
def verdict(answer: str, problem: Problem) -> Outcome:
    """Whether the answer's program passes the problem's tests; equal answers are executed once."""
    return run(program(answer, problem))


def program(answer: str, problem: Problem) -> list[str]:
    """Sources to execute in order, the tests last.

    Where the answer defines the function itself, it follows the prompt, whose imports and helpers it may use. Where it
    goes on from the prompt, as completions do, both are joined. Of several code blocks the first that defines the
    function counts. Trailing lines that do not parse (sentences, or a line that the budget cut) are left out. An
    answer without a program is executed as it is, and fails.
    """
    tests = [problem.test, f"check({problem.entry_point})"]
    pieces = list(_pieces(answer))
    for piece, fenced in pieces:
        whole = _whole(piece, problem.entry_point, fenced)
        if whole is not None:
            return [problem.prompt, whole, *tests]
    for cut in (False, True):  # what fits as a whole is better than what fits in part
        for piece, _ in pieces:
            joined = _joined(piece, problem, cut)
            if joined is not None:
                return [joined, *tests]
    return [problem.prompt, pieces[0][0], *tests]


def _pieces(answer: str) -> Iterator[tuple[str, bool]]:
    """What may hold the program, and whether fences mark it as code: blocks, then the text before the first fence."""
    for block in MARGINED.finditer(answer):
        code = dedent(block.group("code"))
        if FENCE.search(code) and _parsed(code):
            yield code, True
    for block in FENCED.finditer(answer):
        yield dedent(block.group(1)), True
    yield FENCE.split(answer, maxsplit=1)[0], False


def _whole(piece: str, name: str, fenced: bool) -> str | None:
    """The part of a piece that defines `name` and what leads up to it."""
    lines = piece.split("\n")
    defining = re.compile(rf"([ \t]*)(?:(?:async +)?def +{re.escape(name)}\s*\(|{re.escape(name)} *=[^=])")
    at = next((number for number, line in enumerate(lines) if defining.match(line)), None)
    if at is None:
        return None
    margin = defining.match(lines[at]).group(1)
    lines = [line.removeprefix(margin) for line in lines]
    first = next((number for number, line in enumerate(lines[:at]) if BEGINNING.match(line)), at)
    starts = [0, first, at] if fenced else [first, at]
    ends = [len(lines)] if fenced else [_end_of_code(lines, at), len(lines)]
    for start in starts:
        for end in ends:
            for stop in range(end, at, -1):
                code = "\n".join(lines[start:stop])
                tree = _parsed(code)
                if _defines(tree, name):
                    return _without_trials(code, tree, name)
    return None


def _without_trials(code: str, tree: ast.Module, name: str) -> str:
    """The code without the statements behind the function that only try it out: what they print, ask for or assert is
    the model's own, not the problem's test."""
    at = next(place for place, node in enumerate(tree.body) if _defines(ast.Module([node], []), name))
    kept = [node for place, node in enumerate(tree.body) if place <= at or not _tries(node, name)]
    return code if len(kept) == len(tree.body) else ast.unparse(ast.Module(kept, []))


def _tries(node: ast.stmt, name: str) -> bool:
    """Calls of print or of the function, assertions, what is for a program that is executed alone."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return isinstance(node.value.func, ast.Name) and node.value.func.id in ("print", name)
    return isinstance(node, ast.Assert) or (isinstance(node, ast.If) and "__name__" in ast.dump(node.test))


def _end_of_code(lines: list[str], at: int) -> int:
    """The first line behind the function's head that reads like a sentence."""
    for number, line in enumerate(lines[at + 1 :], at + 1):
        if line and not GOES_ON.match(line) and not BEGINNING.match(line):
            return number
    return len(lines)


def _joined(piece: str, problem: Problem, cut: bool) -> str | None:
    """The prompt with the piece as the body of its function: as it is, indented, or with its first line indented.

    `cut` allows for leaving out its last lines.
    """
    forms = [
        _block(form.split("\n"))
        for form in (piece.strip("\n"), indent(dedent(piece).strip("\n"), "    "), "    " + piece.strip())
    ]
    for lines in forms:
        for stop in range(len(lines), 0 if cut else len(lines) - 1, -1):
            code = problem.prompt + "\n".join(lines[:stop]) + "\n"
            if _continues(_parsed(code), problem):
                return code
    return None


def _block(lines: list[str]) -> list[str]:
    """Lines up to the first that is not indented: there the function has ended."""
    end = next((number for number, line in enumerate(lines) if number and line and not line[0].isspace()), len(lines))
    return lines[:end]


def _parsed(code: str) -> ast.Module | None:
    """The syntax tree of code that compiles, else None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd escapes in what a model wrote
        try:
            compile(code, "<answer>", "exec", dont_inherit=True)  # beyond the tree: return outside a function
            return ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _defines(tree: ast.Module | None, name: str) -> bool:
    """Whether a module defines `name` with something to execute: a head with its docstring is the question again."""
    for node in tree.body if tree else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            if any(not _idle(part) for part in node.body):
                return True
        elif isinstance(node, ast.Assign) and any(isinstance(at, ast.Name) and at.id == name for at in node.targets):
            return True
    return False


def _idle(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _continues(tree: ast.Module | None, problem: Problem) -> bool:
    """Whether the prompt's function comes last and has more in it than the prompt gave it."""
    given = _parsed(problem.prompt)
    if not tree or not given:
        return False
    last, before = tree.body[-1], given.body[-1]
    heads = isinstance(last, ast.FunctionDef) and isinstance(before, ast.FunctionDef)
    return heads and last.name == before.name == problem.entry_point and len(last.body) > len(before.body)
