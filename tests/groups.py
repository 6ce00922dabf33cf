"""Which tests stay in one process when several run them (pytest-xdist): its own groups need node ids that pytest 9.2 no
longer lets it mark, so a test's group is read off the sources here."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS = ("smoke", "world", "run", "trained")  # what pipeline tests share: finished runs, minutes each
SANDBOX = ("test_sandbox", "test_code", "test_pass_at_1")  # they count its processes on the whole machine


def group_of(nodeid: str) -> str:
    """A unit module; what shares a run; what counts the sandbox's processes. A pipeline test with a run of its own is a
    group for itself and goes where there is room."""
    file, _, name = nodeid.partition("::")
    stem = Path(file).stem
    if "pipeline" in Path(file).parts:
        used = arguments(ROOT / file, name.partition("[")[0])
        return next((run for run in RUNS if run in used), nodeid)
    return "sandbox" if stem in SANDBOX else stem


def arguments(path: Path, test: str) -> set[str]:
    """Fixtures that a test of a module asks for, itself or through fixtures of the module."""
    asked, todo, known = set(), [test], _functions(path)
    while todo:
        new = set(known.get(todo.pop(), [])) - asked
        asked |= new
        todo += new
    return asked


@cache
def _functions(path: Path) -> dict[str, list[str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: [argument.arg for argument in node.args.args] for node in tree.body
            if isinstance(node, ast.FunctionDef)}  # fmt: skip
