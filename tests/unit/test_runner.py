"""What the sandbox's interpreter does with sources; that it runs nowhere else is in test_sandbox."""

import io
import json
import os

import pytest

from entmtp.evaluation import runner


def test_sources_share_one_namespace_in_order():
    assert runner.execute(["def double(n):\n    return 2 * n", "assert double(4) == 8"]) is None
    assert runner.execute(["assert double(4) == 8", "def double(n):\n    return 2 * n"]) == (
        "NameError: name 'double' is not defined"
    )


def test_nothing_is_left_of_one_run_for_the_next():
    assert runner.execute(["value = 3"]) is None
    assert runner.execute(["print(value)"]).startswith("NameError")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f(:", "SyntaxError"),
        ("assert 1 == 2, 'one is not two'", "AssertionError: one is not two"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import sys; sys.exit()", "SystemExit"),
    ],
)
def test_leaving_early_is_no_success(source, said):
    assert runner.execute([source, "print('never')"]).startswith(said)


def test_a_command_line_of_the_solution_stays_asleep():
    assert runner.execute(["if __name__ == '__main__':\n    raise ValueError"]) is None


def test_an_exception_that_cannot_say_what_it_is():
    source = "class Odd(Exception):\n    def __str__(self):\n        raise ValueError\nraise Odd"
    assert runner.execute([source]) == "Odd"
    assert len(runner.execute(["raise ValueError('x' * 5000)"])) == 300


@pytest.mark.parametrize(("source", "error"), [("x = 1", None), ("x = 1 / 0", "ZeroDivisionError: division by zero")])
def test_the_verdict_carries_the_token_that_came_with_the_sources(monkeypatch, source, error):
    reads, writes = os.pipe()
    monkeypatch.setattr("sys.argv", ["runner", str(writes)])
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({"sources": [source], "token": "t0"})))

    class Left(Exception):
        """In place of the end of the process."""

    def leave(status: int) -> None:
        assert status == 0
        raise Left

    monkeypatch.setattr(runner.os, "_exit", leave)
    with pytest.raises(Left):
        runner.main()
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        assert json.loads(pipe.read()) == {"token": "t0", "error": error}
