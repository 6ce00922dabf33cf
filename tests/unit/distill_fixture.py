"""Texts to distil from."""

import hashlib


def texts(count: int = 12) -> list[dict]:
    """Answers that count upwards: something that several tokens at once can be learned on."""
    rows = []
    for number in range(count):
        key = hashlib.sha256(str(number).encode()).hexdigest()[:16]
        rows.append(
            {
                "key": f"{key}/0",
                "prompt_ids": [5, 6, 20 + number],
                "tokens": [20 + (number + n) % 40 for n in range(30)],
            }
        )
    return rows
