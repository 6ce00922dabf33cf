"""What a draw of prompts is made from: rows in memory, or the lines of a file of any size, read one at a time."""

import hashlib
import json
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from entmtp.config import TaskConfig
from entmtp.io import iter_jsonl
from entmtp.layout import prompt_file
from entmtp.tasks.sources import load_source, no_prompts, row_of_line, shared_id


def normalised(row: dict) -> tuple[tuple[str, str], ...]:
    """What makes two prompts the same: roles and words, white space and case apart."""
    return tuple((turn["role"], " ".join(turn["content"].split()).casefold()) for turn in row["messages"])


class MemoryPool:
    """Different prompts of an iterable; the first of equals stays."""

    def __init__(self, rows: Iterable[dict]):
        self.rows = list({normalised(row): row for row in reversed(list(rows))}.values())[::-1]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return self.rows[index]


class FilePool:
    """Different prompts of a JSONL file. Every line is read and checked once; what is kept of it is 32 bytes: place,
    line number and two digests. A row that is drawn is read again."""

    def __init__(self, config: TaskConfig, path: Path):
        self.config, self.path = config, path
        places, numbers, texts, ids = (array("Q") for _ in range(4))
        for number, place, line in iter_jsonl(path):
            row = row_of_line(config, path, number, line)
            if row is not None:
                places.append(place)
                numbers.append(number)
                texts.append(_digest(repr(normalised(row))))
                ids.append(_digest(row["id"]))
        if not places:
            raise no_prompts(config)
        self.places, self.numbers = places, numbers
        self._refuse_shared_ids(np.frombuffer(ids, dtype=np.uint64))
        digests = np.frombuffer(texts, dtype=np.uint64)
        first = np.unique(digests, return_index=True)[1]
        last = len(digests) - 1 - np.unique(digests[::-1], return_index=True)[1]
        self.firsts = first[np.argsort(last)]  # in MemoryPool's order: equals stand where the last of them does

    def _refuse_shared_ids(self, ids: np.ndarray) -> None:
        order = np.argsort(ids, kind="stable")
        twice = order[1:][ids[order][1:] == ids[order][:-1]]
        if len(twice):
            second = int(twice.min())
            first = int(np.flatnonzero(ids == ids[second])[0])
            raise shared_id(self.path, self.numbers[second], self._row(second)["id"], self.numbers[first])

    def __len__(self) -> int:
        return len(self.firsts)

    def __getitem__(self, index: int) -> dict:
        return self._row(int(self.firsts[index]))

    def _row(self, kept: int) -> dict:
        with self.path.open("rb") as file:
            file.seek(self.places[kept])
            line = json.loads(file.readline())
        return row_of_line(self.config, self.path, self.numbers[kept], line)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8])


def open_pool(config: TaskConfig, resources: str | Path) -> MemoryPool | FilePool:
    """A task's different prompts, in the source's order."""
    path = prompt_file(config, resources)
    if path is None or "{prompt}" not in config.template:  # load_source says what is missing
        return MemoryPool(load_source(config, resources))
    return FilePool(config, path)
