"""How modules end that are run with Hydra overrides: `python -m entmtp.engine_bench target=…`."""

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
