"""A small model of another family, in a transformers folder: what docs/own-model.md is tried on.

GPT-NeoX has layer norms, biases, parallel residuals and partial rotary positions: only the generic forward carries it.
"""

import shutil
from pathlib import Path

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def make_neox(folder: Path, tokenizer: Path) -> Path:
    """Random weights, and the tokenizer of the model in `tokenizer`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder / name)
    torch.manual_seed(2)
    config = GPTNeoXConfig(vocab_size=259, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
                           intermediate_size=96, max_position_embeddings=512, initializer_range=0.2)  # fmt: skip
    GPTNeoXForCausalLM(config).save_pretrained(folder)
    return folder
