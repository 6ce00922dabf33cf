"""Head-training text: which prompts may be used, sampling, shards, resuming."""

import json
from dataclasses import replace

import pytest
import torch

from entmtp.config import CorpusConfig, PromptSource
from entmtp.decoding.engine import Decoder
from entmtp.errors import EntmtpError
from entmtp.heads import corpus as module
from entmtp.heads.corpus import in_first_half, known_prompts, training_prompts, write_shard
from entmtp.heads.dedup import KnownPrompts
from entmtp.heads.text import BatchDecoder, Draw, Sequence, choose

QUESTION = "Anna picks 12 apples in the morning and twice as many in the afternoon. How many apples does she pick?"


def known(*prompts: str, threshold: float = 0.6) -> KnownPrompts:
    found = KnownPrompts(threshold)
    for prompt in prompts:
        found.add(prompt)
    return found


@pytest.mark.parametrize(
    ("prompt", "verdict"),
    [
        (QUESTION, "exact"),
        ("  " + QUESTION.upper().replace(" ", "\n"), "exact"),  # case and spaces do not count
        (f"Solve step by step. {QUESTION} Give the number only.", "near"),  # wrapped into a longer turn
        (QUESTION.replace("Anna", "Maria"), "near"),
        (QUESTION.replace("12 apples in the morning", "a basket of pears at noon"), None),
        ("How many apples does she pick?", None),  # too short to tell
        ("Write a poem about the sea in the style of a sailor who has never seen it.", None),
        ("", None),
    ],
)
def test_verdicts(prompt, verdict):
    assert known("Something else entirely, of no importance to anybody at all.", QUESTION).verdict(prompt) == verdict


def test_a_question_inside_a_template_is_known():
    template = f"Answer the question below. Think first.\n\n{QUESTION}\n\nEnd with the number."
    assert known(template).verdict(QUESTION) == "exact"


def test_the_threshold_decides_what_is_near():
    half = " ".join(QUESTION.split()[:10]) + " and then she goes home to sleep for a very long time indeed"
    assert known(QUESTION, threshold=0.3).verdict(half) == "near"
    assert known(QUESTION, threshold=0.9).verdict(half) is None


@pytest.fixture
def files(tmp_path):
    """Twelve prompts of two kinds, one of them twice, a measured one, and one that the pipeline tests on."""
    maths = [f"How much is {n} plus {n + 1} when everybody knows that it is odd and number {n}?" for n in range(8)]
    chat = [f"Tell me about town number {n} and about all that one can see or eat there." for n in range(4)]
    (tmp_path / "maths.jsonl").write_text("".join(json.dumps({"q": text}) + "\n" for text in [*maths, maths[0]]))
    (tmp_path / "chat.jsonl").write_text(
        "".join(json.dumps({"id": f"c{n}", "p": t}) + "\n" for n, t in enumerate(chat))
    )
    (tmp_path / "measure.jsonl").write_text(json.dumps({"turns": [chat[1], "And then?"]}) + "\n")
    content = f"Please answer.\n\n{maths[2]}"
    (tmp_path / "task.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": content}]}) + "\n")
    return tmp_path


def make_corpus(files, **options) -> CorpusConfig:
    sources = [PromptSource(str(files / "maths.jsonl"), "q"), PromptSource(str(files / "chat.jsonl"), "p", samples=3)]
    defaults = {"prompts": sources, "exclude": [PromptSource(str(files / "measure.jsonl"), "turns")],
                "near_duplicate": 1.0, "max_prompt_tokens": 200, "max_new_tokens": 12, "batch": 3,
                "sample_fraction": 0.5, "dtype": "float32"}  # fmt: skip
    return CorpusConfig(**defaults | options)


def prompts_of(files, **options):
    config = make_corpus(files, **options)
    return training_prompts(config, known_prompts(config, [str(files / "task.jsonl")]))


def test_measured_and_repeated_prompts_are_left_out_and_counted(files):
    rows, counts = prompts_of(files)
    assert counts == {"prompts": 10, "excluded_exact": 2, "excluded_near": 0, "duplicates": 1}
    assert len(rows) == 7 + 3 * 3
    assert {row["task"] for row in rows} == {"maths", "chat"}
    assert len({row["key"] for row in rows}) == len(rows)
    texts = " ".join(row["prompt"] for row in rows)
    assert "town number 1" not in texts
    assert "2 plus 3" not in texts
    further = [row for row in rows if not row["key"].endswith("/0")]
    assert all(row["sampled"] for row in further)
    assert 0 < sum(row["sampled"] for row in rows if row["key"].endswith("/0")) < 10


def test_the_order_follows_the_seed_and_is_cut_after_max_texts(files):
    rows, _ = prompts_of(files)
    assert prompts_of(files)[0] == rows
    assert prompts_of(files, max_texts=5)[0] == rows[:5]
    other, _ = prompts_of(files, seed=1)
    assert [row["key"] for row in other] != [row["key"] for row in rows]


def test_halves_are_disjoint_and_whole(files):
    def chosen(second: bool) -> set[str]:
        source = PromptSource(str(files / "chat.jsonl"), "p", half="id", second_half=second)
        return set(module.source_prompts(source))

    assert len(chosen(False)) + len(chosen(True)) == 4
    assert not chosen(False) & chosen(True)
    assert len(chosen(False)) == sum(in_first_half(f"c{n}") for n in range(4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": []}, "corpus.prompts is empty"),
        ({"max_texts": 0}, "no training prompt is left"),
    ],
)
def test_nothing_to_write_is_refused(files, change, message):
    with pytest.raises(EntmtpError, match=message):
        prompts_of(files, **change)


def test_a_wrong_column_names_file_row_and_columns(files):
    source = PromptSource(str(files / "maths.jsonl"), "prompt")
    with pytest.raises(EntmtpError, match=r"maths\.jsonl, row 1: no text in column 'prompt'; it has \['q'\]"):
        prompts_of(files, prompts=[source])


def journal_rows(target, files, path, shard: int = 0, **options) -> list[dict]:
    config = make_corpus(files, **options)
    return write_shard(target, config, [str(files / "task.jsonl")], shard, path).rows


def test_greedy_texts_are_plain_decodings(tiny, files, tmp_path):
    from entmtp.config import DecodingConfig

    rows = journal_rows(tiny, files, tmp_path / "j", sample_fraction=0.0)
    decoder = Decoder(tiny, None, 300)
    greedy = [row for row in rows if not row["sampled"]]
    assert len(greedy) == 10
    for row in greedy:
        assert row["tokens"] == decoder.plain(row["prompt_ids"], DecodingConfig(max_new_tokens=12)).tokens


def test_shards_are_disjoint_and_hold_the_whole_corpus(tiny, files, tmp_path):
    whole = {row["key"]: row for row in journal_rows(tiny, files, tmp_path / "whole")}
    parts = [journal_rows(tiny, files, tmp_path / str(n), n, shards=3, batch=2) for n in range(3)]
    assert sorted(len(part) for part in parts) == [5, 5, 6]
    rows = {row["key"]: row for part in parts for row in part}
    assert rows == whole  # a text does not depend on what else is in the batch
    with pytest.raises(EntmtpError, match=r"corpus\.shards=40"):
        journal_rows(tiny, files, tmp_path / "none", 39, shards=40)


def test_an_interrupted_shard_resumes_without_loss(tiny, files, tmp_path, monkeypatch, interrupted_batches):
    whole = {row["key"]: row for row in journal_rows(tiny, files, tmp_path / "whole")}
    with interrupted_batches(5):
        journal_rows(tiny, files, tmp_path / "j")
    made = []
    sequences = module._sequences
    monkeypatch.setattr(module, "_sequences", lambda t, c, rows: made.extend(rows) or sequences(t, c, list(rows)))
    rows = {row["key"]: row for row in journal_rows(tiny, files, tmp_path / "j")}
    assert rows == whole
    assert len(made) == len(whole) - 5


def test_draws_follow_the_distribution_and_the_seed():
    logits = torch.tensor([1.0, 3.0, 2.0, -torch.inf, 0.5])
    expected = (logits / 0.7).softmax(dim=0)

    def drawn(seed: int) -> list[int]:
        sequences = [Sequence(str(n), [0] * (n % 5 + 1), [], draw=Draw(0.7, seed, str(n))) for n in range(4000)]
        return choose(sequences, logits.expand(4000, -1))

    first = drawn(0)
    counts = torch.bincount(torch.tensor(first), minlength=5) / 4000
    assert float((counts - expected).abs().max()) < 0.03
    assert counts[3] == 0
    assert drawn(0) == first
    assert drawn(1) != first
    assert 0 <= min(Draw(1.0, 0, "k").uniform(p) for p in range(500)) < 0.05
    assert len({Draw(1.0, 0, "k").uniform(p) for p in range(500)}) == 500


def test_greedy_and_drawn_rows_keep_their_places():
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(1))
    sequences = [Sequence(str(n), [1], [], draw=Draw(5.0, 3, str(n)) if n % 2 else None) for n in range(6)]
    together = choose(sequences, logits)
    assert together == [choose([sequence], row[None])[0] for sequence, row in zip(sequences, logits, strict=True)]
    assert together[::2] == logits[::2].argmax(dim=-1).tolist()


def test_long_prompts_are_skipped(tiny, files, tmp_path):
    rows = journal_rows(tiny, files, tmp_path / "j", max_prompt_tokens=90)
    lengths = [len(row["prompt_ids"]) for row in rows]
    everything = [len(row["prompt_ids"]) for row in journal_rows(tiny, files, tmp_path / "k")]
    assert sorted(lengths) == sorted(n for n in everything if n <= 90)


def test_another_configuration_starts_the_journal_afresh(tiny, files, tmp_path):
    first = journal_rows(tiny, files, tmp_path / "j")
    assert journal_rows(tiny, files, tmp_path / "j") == first
    longer = journal_rows(tiny, files, tmp_path / "j", max_new_tokens=14)
    assert max(len(row["tokens"]) for row in longer) == 14
    assert replace(make_corpus(files), seed=1) != make_corpus(files)


# --- targets without a fused forward ----------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [False, True])
def test_any_transformers_model_writes_the_same_texts(tiny_folder, tiny, stop):
    """Left-padded batches of `generate` against the fused slots: greedy, drawn, and choices coupled to noise."""
    from entmtp.config import DecodingConfig, TargetConfig
    from entmtp.decoding.engine import make_chooser
    from entmtp.heads.text import GenerateDecoder, batch_decoder
    from entmtp.target.load import load_target

    generic = load_target(TargetConfig(name="tiny", source="random", forward="generic"), tiny_folder, "float32")
    prompts = {f"p{n}": [10 + (7 * n + k) % 200 for k in range(1 + 4 * (n % 4))] for n in range(7)}

    def sequences():
        for n, (key, prompt) in enumerate(prompts.items()):
            decoding = DecodingConfig(mode="sample", temperature=0.9, seed=2)
            chooser = make_chooser(tiny, decoding, key) if n % 3 == 2 else None
            yield Sequence(key, prompt, [], chooser, Draw(0.9, 1, key) if n % 3 == 1 else None)

    stops = set()
    if stop:
        first = {s.key: s.tokens for s in BatchDecoder(tiny.model, 3, 64, set(), 14).run(sequences())}
        stops = {first["p0"][3], first["p4"][5]}
    fused = BatchDecoder(tiny.model, 3, 64, stops, 14)
    other = replace(generic, stop_ids=stops)
    made = batch_decoder(other, 3, 64, 14)
    assert isinstance(made, GenerateDecoder)
    made.model.generation_config.repetition_penalty = 1.9  # some models bring one: their `generate` is not greedy then
    expected = {s.key: s.tokens for s in fused.run(sequences())}
    assert {s.key: s.tokens for s in made.run(sequences())} == expected
    assert made.model.generation_config.repetition_penalty == 1.9
    assert len({len(tokens) for tokens in expected.values()}) > 1 or not stop
