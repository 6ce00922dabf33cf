"""Head-training text: the target's own continuations of training prompts, in shards that resume text by text."""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from entmtp.config import CorpusConfig, PromptSource
from entmtp.errors import EntmtpError
from entmtp.heads.dedup import KnownPrompts, text_hash
from entmtp.heads.text import BatchDecoder, Draw, GenerateDecoder, Sequence, batch_decoder
from entmtp.io import Journal, iter_jsonl, read_jsonl, sha256_json
from entmtp.tasks.prompts import encode
from entmtp.tasks.sources import in_first_half


def known_prompts(config: CorpusConfig, prompt_files: Iterable[str]) -> KnownPrompts:
    """Every calibration and test prompt of the pipeline, and those of `corpus.exclude`."""
    known = KnownPrompts(config.near_duplicate)
    for path in prompt_files:
        for row in read_jsonl(path):
            for message in row["messages"]:
                known.add(message["content"])
    for source in config.exclude:
        for text in source_prompts(source):
            known.add(text)
    return known


def source_prompts(source: PromptSource) -> Iterator[str]:
    """Prompts of a file's rows that the source's half keeps. A list of turns gives a prompt a turn."""
    for index, (_, _, row) in enumerate(iter_jsonl(source.file)):
        if source.half and source.half not in row:
            raise EntmtpError(f"{source.file}, row {index + 1}: no column '{source.half}', which halves the file")
        if source.half and in_first_half(str(row[source.half])) == source.second_half:
            continue
        value = row.get(source.column)
        for text in value if isinstance(value, list) and value else [value]:
            if not isinstance(text, str) or not text.strip():
                raise EntmtpError(
                    f"{source.file}, row {index + 1}: no text in column '{source.column}'; it has {sorted(row)}"
                )
            yield text


def training_prompts(config: CorpusConfig, known: KnownPrompts) -> tuple[list[dict], dict]:
    """Prompts for text generation in a seeded order, without any that is `known` (exactly or nearly).

    Returns rows {key, task, prompt, sampled} and counts for the card. One prompt may appear several times: its first
    text is greedy or sampled as `sample_fraction` says, further ones are sampled.
    """
    if not config.prompts:
        raise EntmtpError(
            "corpus.prompts is empty: name a JSONL file of training prompts, or set "
            "corpus.self_prompts and the target writes its own"
        )
    rows, seen = [], set()
    counts = {"prompts": 0, "excluded_exact": 0, "excluded_near": 0, "duplicates": 0}
    for source in config.prompts:
        taken = 0
        for prompt in source_prompts(source):
            if taken >= source.limit:
                break
            digest = text_hash(prompt)
            verdict = "duplicates" if digest in seen else known.verdict(prompt)
            if verdict is not None:
                counts[verdict if verdict == "duplicates" else f"excluded_{verdict}"] += 1
                continue
            seen.add(digest)
            taken += 1
            for sample in range(source.samples):
                draw = hashlib.sha256(f"{config.seed}/{digest}/{sample}".encode()).digest()
                # other bytes than those of `order`: the first texts of the order are as mixed as all of them
                sampled = sample > 0 or draw[0] / 256 < config.sample_fraction
                rows.append({"key": f"{digest[:16]}/{sample}", "task": source.task or Path(source.file).stem,
                             "prompt": prompt, "sampled": sampled, "order": draw[8:]})  # fmt: skip
        counts["prompts"] += taken
    rows.sort(key=lambda row: row.pop("order"))
    rows = rows[: config.max_texts]
    if not rows:
        raise EntmtpError("corpus.prompts: no training prompt is left after de-duplication")
    return rows, counts


def write_shard(target, config: CorpusConfig, prompt_files: list[str], shard: int, journal_path: Path) -> Journal:
    """Generate shard number `shard` of the corpus, a journal line a text: {key, task, prompt_ids, tokens, sampled}.

    An interrupted call resumes where it stopped.
    """
    rows, counts = training_prompts(config, known_prompts(config, prompt_files))
    rows = rows[shard :: config.shards]
    if not rows:
        raise EntmtpError(f"corpus.shards={config.shards}: there are fewer texts than shards")
    fingerprint = sha256_json([target.fingerprint, target.tokenizer.chat_template, target.dtype_name,
                               config.max_new_tokens, config.max_prompt_tokens, config.temperature, config.seed,
                               [[row["key"], row["sampled"]] for row in rows]])  # fmt: skip
    journal = Journal(journal_path, fingerprint)
    done = journal.done(lambda row: row["key"])
    todo = {row["key"]: row for row in rows if row["key"] not in done}
    print(f"text: {len(rows)} prompts, {len(done)} already done; of the whole corpus: {counts}", flush=True)
    capacity = config.max_prompt_tokens + config.max_new_tokens
    decoder = batch_decoder(target, config.batch, capacity, config.max_new_tokens)

    def row_of(sequence: Sequence) -> dict:
        row = todo[sequence.key]
        return {"key": sequence.key, "task": row["task"], "prompt_ids": sequence.prompt, "tokens": sequence.tokens,
                "sampled": row["sampled"]}  # fmt: skip

    write_texts(decoder, _sequences(target, config, todo.values()), journal, len(rows), row_of)
    return journal


def text_row(sequence: Sequence) -> dict:
    return {"key": sequence.key, "prompt_ids": sequence.prompt, "tokens": sequence.tokens}


def write_texts(
    decoder: BatchDecoder | GenerateDecoder, sequences: Iterable[Sequence], journal: Journal, total: int,
    row_of: Callable[[Sequence], dict] = text_row,
) -> None:  # fmt: skip
    """Decode `sequences` into the journal, a line each; progress in texts, of `total`."""
    start, tokens = time.monotonic(), 0
    for count, sequence in enumerate(decoder.run(sequences), 1):
        journal.append(row_of(sequence))
        tokens += len(sequence.tokens)
        if count % 50 == 0:
            rate = tokens / (time.monotonic() - start)
            print(f"text: {len(journal.rows)}/{total} prompts, {tokens} tokens, {rate:.0f} tokens/s", flush=True)


def _sequences(target, config: CorpusConfig, rows: Iterable[dict]) -> Iterator[Sequence]:
    for row in rows:
        ids = encode(target.tokenizer, [{"role": "user", "content": row["prompt"]}])
        if len(ids) > config.max_prompt_tokens:
            continue  # a rare long prompt would hold a whole batch's memory
        draw = Draw(config.temperature, config.seed, row["key"]) if row["sampled"] else None
        yield Sequence(row["key"], ids, [], draw=draw)
