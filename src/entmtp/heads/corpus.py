"""Head-training text: the target's own continuations of training prompts, resumable prompt by prompt."""

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

from entmtp.config import PromptSource, TrainConfig
from entmtp.decoding.sampling import Chooser, GumbelNoise
from entmtp.errors import EntmtpError
from entmtp.heads.text import BatchDecoder, Sequence
from entmtp.io import Journal, read_jsonl, sha256_json
from entmtp.tasks.prompts import encode


def normalise(text: str) -> str:
    return " ".join(text.split()).casefold()


def text_hash(text: str) -> str:
    """Identity of a prompt for de-duplication: whitespace and case do not count."""
    return hashlib.sha256(normalise(text).encode()).hexdigest()


def in_first_half(key: str) -> bool:
    """Half of all keys, by hash: how a file is divided between training and measuring."""
    return hashlib.sha256(key.encode()).digest()[0] < 128


def training_prompts(config: TrainConfig, exclude: set[str]) -> tuple[list[dict], dict]:
    """Prompts for text generation, in a seeded order, without any prompt whose `text_hash` is in `exclude`.

    Returns rows {key, prompt, sampled} and counts for the card. One prompt may appear several times: its first text
    is greedy or sampled as `sample_fraction` says, further ones are sampled.
    """
    rows, seen = [], set()
    counts = {"prompts": 0, "excluded": 0, "duplicates": 0}
    for source in config.prompts:
        taken = 0
        for index, row in enumerate(read_jsonl(source.file)):
            prompt = _field(source, row, index)
            digest = text_hash(prompt)
            if taken >= source.limit or (source.half and not in_first_half(str(row[source.half]))):
                continue
            if digest in exclude or digest in seen:
                counts["excluded" if digest in exclude else "duplicates"] += 1
                continue
            seen.add(digest)
            taken += 1
            for sample in range(source.samples):
                draw = hashlib.sha256(f"{config.seed}/{digest}/{sample}".encode()).digest()
                # other bytes than those of `order`: the first texts of the order are as mixed as all of them
                sampled = sample > 0 or draw[0] / 256 < config.sample_fraction
                rows.append({"key": f"{digest[:16]}/{sample}", "prompt": prompt, "sampled": sampled, "order": draw[8:]})
        counts["prompts"] += taken
    rows.sort(key=lambda row: row.pop("order"))
    rows = rows[: config.max_texts]
    if not rows:
        raise EntmtpError("heads.train.prompts: no training prompt is left; name at least one JSONL file")
    return rows, counts


def _field(source: PromptSource, row: dict, index: int) -> str:
    value = row.get(source.column)
    if not isinstance(value, str) or not value.strip():
        raise EntmtpError(f"{source.file}, row {index + 1}: no text in column '{source.column}'; it has {sorted(row)}")
    return value


def write_texts(target, config: TrainConfig, exclude: set[str], journal_path: Path) -> tuple[Journal, dict]:
    """Generate the texts of `training_prompts`, one journal line each {key, prompt_ids, tokens, sampled}."""
    rows, counts = training_prompts(config, exclude)
    fingerprint = sha256_json([target.fingerprint, target.dtype_name, config.max_new_tokens, config.temperature,
                               config.seed, [[row["key"], row["sampled"]] for row in rows]])  # fmt: skip
    journal = Journal(journal_path, fingerprint)
    done = journal.done(lambda row: row["key"])
    todo = [row for row in rows if row["key"] not in done]
    print(f"text: {len(rows)} prompts, {len(done)} already done", flush=True)
    sampled = {row["key"]: row["sampled"] for row in todo}
    decoder = BatchDecoder(target.fused, config.batch, config.max_prompt_tokens + config.max_new_tokens,
                           target.stop_ids, config.max_new_tokens)  # fmt: skip
    start, tokens = time.monotonic(), 0
    for count, sequence in enumerate(decoder.run(_sequences(target, config, todo)), 1):
        journal.append({"key": sequence.key, "prompt_ids": sequence.prompt, "tokens": sequence.tokens,
                        "sampled": sampled[sequence.key]})  # fmt: skip
        tokens += len(sequence.tokens)
        if count % 50 == 0:
            rate = tokens / (time.monotonic() - start)
            print(f"text: {len(done) + count}/{len(rows)} prompts, {tokens} tokens, {rate:.0f} tokens/s", flush=True)
    return journal, counts


def _sequences(target, config: TrainConfig, rows: list[dict]) -> Iterator[Sequence]:
    for row in rows:
        ids = encode(target.tokenizer, [{"role": "user", "content": row["prompt"]}])
        if len(ids) > config.max_prompt_tokens:
            continue  # a rare long prompt would hold a whole batch's memory
        chooser = Chooser()
        if row["sampled"]:
            chooser = Chooser(config.temperature, GumbelNoise(config.seed, row["key"], target.vocab_size, keep=2))
        yield Sequence(row["key"], ids, chooser, [])
