"""Inside the sandbox: execute the sources that come on stdin and say on a pipe how it ended.

`sandbox.run` hands this file's text to an interpreter that sees nothing else of the project. The verdict carries the
token that came with the sources, so that code which leaves early, or prints what a verdict looks like, has not passed.
"""

import json
import os
import sys
from contextlib import suppress


def execute(sources: list[str]) -> str | None:
    """Run the sources one after the other in one namespace. Returns what went wrong, None if nothing did."""
    names = {"__name__": "solution"}  # not __main__: a solution's own command line stays asleep
    for source in sources:
        try:
            exec(compile(source, "<source>", "exec"), names)
        except BaseException as error:  # SystemExit and KeyboardInterrupt are no success either
            return describe(error)
    return None


def describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:300]
    except BaseException:  # an exception of theirs may fail to say what it is
        return type(error).__name__


def main() -> None:
    job = json.loads(sys.stdin.read())
    error = execute(job["sources"])
    with suppress(OSError, ValueError, AttributeError):  # closed or replaced by them
        sys.stdout.flush()
    os.write(int(sys.argv[1]), json.dumps({"token": job["token"], "error": error}).encode())
    os._exit(0)  # no threads, exit handlers or destructors of theirs


if __name__ == "__main__":
    main()
