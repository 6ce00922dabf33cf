"""Where prompts come from: sources, the calibration/test split, chat encoding and prompts.jsonl."""

from entmtp.tasks.prompts import build_prompts, encode, prompts_hash, read_prompts, split_prompts
from entmtp.tasks.sources import hub_commit, load_source

__all__ = [
    "build_prompts",
    "encode",
    "hub_commit",
    "load_source",
    "prompts_hash",
    "read_prompts",
    "split_prompts",
]
