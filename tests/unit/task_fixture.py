"""Prompts and task files for tests of tasks."""

import json
from pathlib import Path

from entmtp.config import CONF, TaskConfig
from entmtp.tasks import load_source

RESOURCES = CONF.parent / "resources"


def raw(*texts: str) -> list[dict]:
    return [{"id": f"r/{n}", "messages": [{"role": "user", "content": text}]} for n, text in enumerate(texts)]


def texts(rows) -> list[str]:
    return [row["messages"][-1]["content"] for row in rows]


def file_task(path: Path, *lines: str | dict, **settings) -> TaskConfig:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return TaskConfig(name="mine", source="file", file=str(path), **settings)


def load(config: TaskConfig, resources: str | Path = RESOURCES) -> list[dict]:
    return list(load_source(config, resources))
