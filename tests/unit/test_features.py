"""What heads learn from: hidden states and top logits of texts, in shards; held-out prompts; the draft vocabulary."""

import hashlib

import pytest
import torch
from train_fixture import CORPUS, texts

from entmtp.errors import EntmtpError
from entmtp.heads.features import (
    Features,
    compute_shard,
    draft_vocabulary,
    is_held_out,
    packs,
    read_shard,
    top_k,
    write_shard_features,
)


def test_texts_that_share_a_forward_have_the_features_of_their_own(tiny, features):
    pack_sizes = [len(pack) for pack in packs(texts(), 40)]
    assert max(pack_sizes) > 2
    assert sum(pack_sizes) == 60
    assert [row for pack in packs(texts(), 40) for row in pack] == texts()
    together = Features([compute_shard(tiny, texts(), CORPUS, packed=40)])
    assert torch.equal(together.tokens, features.tokens)
    assert [vars(text) for text in together.texts] == [vars(text) for text in features.texts]
    assert (together.hidden[0].float() - features.hidden[0].float()).abs().max() < 0.05  # they are kept in bfloat16
    assert (together.top_logp - features.top_logp).abs().max() < 0.01


def test_features_are_the_targets_own(tiny, features):
    rows = sorted(texts(), key=lambda row: row["key"])
    assert [text.end - text.start for text in features.texts] == [len(row["tokens"]) for row in rows]
    with torch.inference_mode():
        for row, text in list(zip(rows, features.texts, strict=True))[::7]:
            assert text.task == row["task"]
            assert features.tokens[text.start : text.end].tolist() == row["tokens"]
            assert features.remaining[text.start : text.end].tolist() == list(range(text.end - text.start))[::-1]
            assert text.held_out == is_held_out(row["key"], 0.25)
            states = tiny.prefill(row["prompt_ids"] + row["tokens"], tiny.new_cache(64))[:-1]
            torch.testing.assert_close(features.sequence(text).float(), states, rtol=1e-2, atol=1e-2)
            states = states[len(row["prompt_ids"]) - 1 :]  # row i chose token i
            index = torch.arange(text.start, text.end)
            torch.testing.assert_close(features.hidden_at(index).float(), states, rtol=1e-2, atol=1e-2)
            logp = tiny.model.logits(states).log_softmax(dim=-1)
            top = features.top_logp[text.start : text.end].float()
            torch.testing.assert_close(top, logp.topk(8).values, rtol=2e-3, atol=2e-3)
            assert torch.equal(features.top_ids[text.start : text.end].long(), logp.topk(8).indices)


def test_several_shards_on_disk_are_one_corpus(tiny, features, tmp_path):
    rows = sorted(texts(), key=lambda row: row["key"])  # in the order of one shard, so that positions agree
    paths = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for path, part in zip(paths, (rows[:7], rows[7:8], rows[8:]), strict=True):
        write_shard_features(compute_shard(tiny, part, CORPUS), path)
    stored = Features.open(paths)
    assert stored.texts == features.texts
    for name in ("tokens", "remaining", "top_ids", "top_logp", "rows"):
        assert torch.equal(getattr(stored, name), getattr(features, name))
    index = torch.randperm(len(features.tokens), generator=torch.Generator().manual_seed(2))[:50]
    assert torch.equal(stored.hidden_at(index), features.hidden_at(index))
    for number in (0, 6, 7, 8, 40):
        assert torch.equal(stored.sequence(stored.texts[number]), features.sequence(features.texts[number]))


def test_a_damaged_shard_is_one_clear_error(tiny, tmp_path):
    path = tmp_path / "000.safetensors"
    write_shard_features(compute_shard(tiny, texts(2), CORPUS), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(EntmtpError, match=r"000\.safetensors: not a file of training features"):
        read_shard(path)


@pytest.mark.parametrize(("size", "k"), [(4, 2), (64, 8), (1000, 3), (4096, 16), (1027, 16)])
def test_top_k_of_a_large_vocabulary(size, k):
    logits = torch.randn(9, size, generator=torch.Generator().manual_seed(0))
    values, ids = top_k(logits, k, chunk=16)
    expected = logits.topk(k)
    assert torch.equal(values, expected.values)
    assert torch.equal(ids, expected.indices)


def test_share_of_held_out_prompts():
    keys = [hashlib.sha256(str(n).encode()).hexdigest() + "/0" for n in range(2000)]
    assert sum(is_held_out(key, 0.1) for key in keys) == pytest.approx(200, abs=60)
    assert not any(is_held_out(key, 0.0) for key in keys)


def shard(texts: list[tuple[list[int], bool]]) -> dict:
    tokens = torch.tensor([token for text, _ in texts for token in text], dtype=torch.int32)
    empty = torch.zeros(len(tokens), 1)
    return {"hidden": empty, "tokens": tokens, "top_ids": empty, "top_logp": empty,
            "texts": [("t", held, 0, len(text)) for text, held in texts]}  # fmt: skip


def test_draft_vocabulary_counts_training_texts_only_and_breaks_ties_by_id():
    parts = [([7, 7, 7, 2, 2], False), ([9, 9, 4], False), ([1, 1, 1, 1, 1], True)]
    features = Features([shard(parts)])
    assert draft_vocabulary(features, 4, 12).tolist() == [7, 2, 9, 4]
    # tokens that never occur come last, by id; the held-out text's token 1 is one of them
    assert draft_vocabulary(features, 7, 12).tolist() == [7, 2, 9, 4, 0, 1, 3]
    assert sorted(draft_vocabulary(features, 99, 12).tolist()) == list(range(12))
