"""How modules end that are run as commands: `python -m entmtp.engine_bench target=…`."""

import sys
from collections.abc import Callable
from typing import NoReturn

from entmtp.errors import EntmtpError


def run_command(main: Callable[[list[str]], int | None], about: str) -> NoReturn:
    """Exit with what `main` returns for the command line's overrides; `--help` shows `about`, the module's docstring.

    A mistake of the user's is one line on stderr and status 1.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(about.strip())
        sys.exit(0)
    try:
        sys.exit(main(sys.argv[1:]))
    except EntmtpError as error:
        sys.exit(f"error: {error}")


def exit_status(action: Callable[[], None]) -> int:
    """0 when `action` is done; 1 with one line on stderr for a mistake of the user's."""
    try:
        action()
    except EntmtpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
