"""Exact and near duplicates of prompts, so that heads never learn from what measures them."""

import hashlib
from collections import Counter, defaultdict

SHINGLE = 5  # words
SHARED_AT_LEAST = 3  # shingles: shorter overlaps are figures of speech


def normalise(text: str) -> str:
    return " ".join(text.split()).casefold()


def text_hash(text: str) -> str:
    """Identity of a prompt: whitespace and case do not count."""
    return hashlib.sha256(normalise(text).encode()).hexdigest()


def shingles(text: str) -> set[str]:
    """All runs of SHINGLE words."""
    words = normalise(text).split()
    return {" ".join(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)}


class KnownPrompts:
    """Prompts that must not be met again. `verdict` names the kind of match.

    Near means: at least `threshold` of the shorter prompt's word 5-grams occur in the other. Measuring against the
    shorter one finds a question inside a template or a longer chat turn.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.hashes: set[str] = set()
        self.sizes: list[int] = []
        self.owners: dict[str, list[int]] = defaultdict(list)

    def add(self, text: str) -> None:
        """Know a prompt, and its longest paragraph by itself (what a template wraps)."""
        self.hashes.update((text_hash(text), text_hash(max(text.split("\n\n"), key=len))))
        for shingle in (own := shingles(text)):
            self.owners[shingle].append(len(self.sizes))
        self.sizes.append(len(own))

    def verdict(self, text: str) -> str | None:
        """exact | near | None."""
        if text_hash(text) in self.hashes:
            return "exact"
        own = shingles(text)
        shared = Counter(owner for shingle in own for owner in self.owners.get(shingle, ()))
        for owner, count in shared.items():
            if count >= max(SHARED_AT_LEAST, self.threshold * min(len(own), self.sizes[owner])):
                return "near"
        return None
