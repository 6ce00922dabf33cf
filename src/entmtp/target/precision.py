"""Which dtype is fast here: bfloat16 halves what is read, but a processor without instructions for it emulates them."""

from functools import cache
from pathlib import Path

import torch

INSTRUCTIONS = {"amx_bf16", "avx512_bf16", "bf16"}  # x86's two and Arm's, as Linux names them


def resolved(dtype: str, device: str) -> str:
    """`dtype`, or for "auto" the faster one of bfloat16 and float32 for many rows on `device`."""
    if dtype != "auto":
        return dtype
    if torch.device(device).type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    return "bfloat16" if processor_features() & INSTRUCTIONS else "float32"


@cache
def processor_features(path: str = "/proc/cpuinfo") -> frozenset[str]:
    """Of the first processor; none where the system does not say."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return frozenset(found.partition(":")[2].split())
