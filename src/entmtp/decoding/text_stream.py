"""From committed tokens to text that may be shown: whole characters only, and nothing of a stop string."""

from collections.abc import Iterable
from typing import Any

from entmtp.errors import EntmtpError


class TextStream:
    """Committed token ids in, printable text out: never half a character.

    The whole list is decoded each time, since a token's text may depend on its neighbours. Replacement characters at
    the end may be the first bytes of a character that the next tokens complete, so they wait.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.tokens, self.shown = tokenizer, [], 0

    def push(self, tokens: list[int]) -> str:
        self.tokens.extend(tokens)
        return self._new(self._text().rstrip("\ufffd"))

    def close(self) -> str:
        """What was still held back: the text has ended, so it is complete as it is."""
        return self._new(self._text())

    def _text(self) -> str:
        return self.tokenizer.decode(self.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _new(self, text: str) -> str:
        new = text[self.shown :]
        self.shown += len(new)
        return new


def special_ids(tokenizer: Any, strings: Iterable[str]) -> set[int]:
    """Ids of the special tokens among `strings`: decoded text leaves them out, so that they are looked for by id."""
    special = set(tokenizer.all_special_tokens) | {
        str(token) for token in tokenizer.added_tokens_decoder.values() if token.special
    }
    return {tokenizer.convert_tokens_to_ids(string) for string in strings if string in special}


class StopStrings:
    """Cuts a text before the first stop string, wherever its pieces are divided.

    What could be the beginning of a stop string is held back until the next piece decides.
    """

    def __init__(self, strings: str | Iterable[str] = ()):
        self.strings = (strings,) if isinstance(strings, str) else tuple(strings)
        if not all(isinstance(string, str) and string for string in self.strings):
            raise EntmtpError(f"stop strings must be non-empty strings, found {list(self.strings)!r:.80}")
        self.held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Text that may be shown, and whether a stop string has come (the text before it is then complete)."""
        self.held += piece
        places = [self.held.find(string) for string in self.strings if string in self.held]
        if places:
            return self._release(min(places)), True
        return self._release(len(self.held) - self._beginning()), False

    def close(self) -> str:
        """The text has ended without a stop string."""
        return self._release(len(self.held))

    def _beginning(self) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        longest = 0
        for string in self.strings:
            for size in range(min(len(string) - 1, len(self.held)), longest, -1):
                if self.held.endswith(string[:size]):
                    longest = size
                    break
        return longest

    def _release(self, size: int) -> str:
        shown, self.held = self.held[:size], self.held[size:]
        return shown
