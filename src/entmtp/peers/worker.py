"""One peer in a process of its own: reads prompts from standard input, answers with tokens and seconds.

The first line in is the setting, answered by {"ready": true} or {"error": why}. Then a line in is {"task", "prompt":
token ids, "max_new_tokens"} and a line out {"tokens", "seconds"}. Whatever libraries print goes to standard error.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from entmtp.errors import EntmtpError

Generate = Callable[[str, list[int], int], list[int]]


def plain(setting: dict) -> Generate:
    """Our plain decoding."""
    from entmtp.config import DecodingConfig, TargetConfig, from_plain
    from entmtp.decoding.engine import Decoder
    from entmtp.session import open_target

    target = open_target(from_plain(TargetConfig, setting["target"]), setting["resources"], setting["dtype"], "cpu")
    decoder = Decoder(target, None, setting["capacity"])
    return lambda task, prompt, budget: decoder.plain(prompt, DecodingConfig(max_new_tokens=budget)).tokens


def best(setting: dict) -> Generate:
    """Our fastest fitted policy of each task."""
    from entmtp.config import DecodingConfig, HeadsConfig, TargetConfig, from_plain
    from entmtp.session import load_policy, open_decoder, open_target

    target = open_target(from_plain(TargetConfig, setting["target"]), setting["resources"], setting["dtype"], "cpu")
    decoders, policies = {}, {}
    for task, (kind, policy) in setting["policies"].items():
        policies[task] = load_policy(setting["run"], task, kind, policy)[0], kind
        if kind not in decoders:
            heads = from_plain(HeadsConfig, setting["heads"][kind])
            folder = Path(setting["heads_folders"][kind])
            decoders[kind] = open_decoder(target, heads, folder, setting["capacity"])

    def generate(task: str, prompt: list[int], budget: int) -> list[int]:
        policy, kind = policies[task]
        return decoders[kind].generate(prompt, policy, DecodingConfig(max_new_tokens=budget)).tokens

    return generate


def transformers_generate(setting: dict, attention: str, **options) -> Generate:
    """transformers' `generate`, greedy."""
    import torch
    from transformers import AutoModelForCausalLM

    from entmtp.target.load import DTYPES

    folder = setting["folder"]
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES[setting["dtype"]], attn_implementation=attention, trust_remote_code=False
    ).eval()

    @torch.inference_mode()
    def generate(task: str, prompt: list[int], budget: int) -> list[int]:
        ids = torch.tensor([prompt])
        # a generation config may carry a repetition penalty: the baseline decodes what the model says, as ours does
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=budget, do_sample=False,
                              repetition_penalty=1.0, pad_token_id=0, **options)  # fmt: skip
        return made[0, len(prompt) :].tolist()

    return generate


def llama_cpp_generate(setting: dict, packed: bool) -> Generate:
    from entmtp.peers.llama_cpp import llama_cpp

    return llama_cpp(setting, packed)


PEERS: dict[str, Callable[[dict], Generate]] = {
    "entmtp plain": plain,
    "entmtp best": best,
    "transformers eager": lambda setting: transformers_generate(setting, "eager"),
    "transformers sdpa": lambda setting: transformers_generate(setting, "sdpa"),
    "transformers prompt lookup": lambda setting: transformers_generate(setting, "sdpa", prompt_lookup_num_tokens=10),
    "llama.cpp": lambda setting: llama_cpp_generate(setting, packed=False),
    "llama.cpp Q4_1": lambda setting: llama_cpp_generate(setting, packed=True),  # smaller weights in either run
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print to standard output must not end up among the answers

    def say(answer: dict) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    setting = json.loads(sys.stdin.readline())
    try:
        import torch

        torch.set_num_threads(setting["threads"])
        generate = PEERS[setting["peer"]](setting)
    except (EntmtpError, ImportError, OSError, ValueError) as error:
        say({"error": " ".join(str(error).split())[:300]})
        return
    say({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        tokens = generate(asked["task"], asked["prompt"], asked["max_new_tokens"])
        say({"tokens": tokens, "seconds": time.perf_counter() - start})


if __name__ == "__main__":
    main()
