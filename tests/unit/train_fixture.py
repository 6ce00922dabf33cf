"""Texts, their features and settings, small enough to train on in a test."""

import hashlib

import torch

from entmtp.config import CorpusConfig, HeadsConfig, TrainConfig

CORPUS = CorpusConfig(held_out=0.25, top_k=8)


def texts(count: int = 30) -> list[dict]:
    """Two texts a prompt over few tokens with a pattern that heads can learn."""
    rows = []
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        digest = hashlib.sha256(str(number).encode()).hexdigest()[:16]
        for sample in range(2):
            start = int(torch.randint(10, 40, (1,), generator=generator))
            length = int(torch.randint(1, 16, (1,), generator=generator))
            tokens = [10 + (start + 7 * step) % 30 for step in range(length)]
            task = "maths" if number % 3 else "chat"
            rows.append({"key": f"{digest}/{sample}", "task": task, "prompt_ids": [5, 6, start], "tokens": tokens})
    return rows


def make_config(kind: str = "hydra", **train) -> HeadsConfig:
    options = {"draft_vocab": 24, "epochs": 2, "batch_positions": 40, "warmup": 3, "checkpoint_every": 3,
               "learning_rate": 3e-3, "seed": 1} | train  # fmt: skip
    arch = "medusa" if kind == "medusa" else "hydra"
    return HeadsConfig(name="test", arch=arch, depth=3, blocks=1, width=8, source="train",
                       prefix=kind == "hydra_plus", train=TrainConfig(**options))  # fmt: skip
