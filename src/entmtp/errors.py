"""The one exception that a user is meant to read."""


class EntmtpError(Exception):
    """Bad input or environment. The message names the file, key or value and says what would be right."""


def first_line(error: BaseException) -> str:
    """What an exception says, short enough for a message; its type where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
