"""The one exception that a user is meant to read."""


class EntmtpError(Exception):
    """Bad input or environment. The message names the file, key or value and says what would be right."""
