"""Rows of self-distillation: the paper's two examples, who sees whom, and that a row equals what decoding reads."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from entmtp.distill.packing import PADDING, REAL, Layout, block_mask, layout, pack, paper_layout, text_layout
from entmtp.errors import EntmtpError

MASK_ID = 7


def shown(one: Layout) -> str:
    """As FACTS 6 writes rows: positions, masks in brackets."""
    pieces, previous = [], REAL
    for position, block in zip(one.positions, one.block, strict=True):
        if block != previous and previous != REAL:
            pieces[-1] += "]"
        pieces.append(("[" if block != previous and block != REAL else "") + str(position))
        previous = block
    return " ".join(pieces) + ("]" if previous != REAL else "")


@pytest.mark.parametrize(
    ("offset", "expected"),
    [(0, "0 1 2 3 [4 5] 4 5 6 7 [8 9] 8 9 10 11 [12 13]"), (-2, "0 1 [2 3] 2 3 4 5 [6 7] 6 7 8 9 [10 11] 10 11")],
)
def test_the_papers_examples(offset, expected):
    one = paper_layout(18, 3, 3, offset)
    assert shown(one) == expected
    assert len(one.positions) == 18
    for number, places in enumerate(one.predict):
        assert [one.block[place] for place in places] == [REAL, number, number]
        assert [one.positions[place] for place in places] == list(
            range(one.positions[places[0]], one.positions[places[0]] + 3)
        )


@pytest.mark.parametrize(
    ("width", "regions", "k", "offset"), [(17, 3, 3, 0), (18, 3, 7, 0), (18, 3, 3, 1), (18, 3, 3, -4)]
)
def test_impossible_rows_are_refused(width, regions, k, offset):
    with pytest.raises(EntmtpError, match="packing"):
        paper_layout(width, regions, k, offset)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (40, "0 1 [2 3] 2 3 4 5 [6 7] 6 7 8 9 [10 11] 10 11"),
        (10, "0 1 [2 3] 2 3 4 5 [6 7] 6 7 8 9 [10 11]"),
        (9, "0 1 [2 3] 2 3 4 5 [6 7] 6 7 8"),
        (1, None),
    ],
)
def test_a_region_that_a_text_does_not_reach_is_left_out(length, expected):
    one = paper_layout(18, 3, 3, -2, length)
    assert (one and shown(one)) == expected


@pytest.mark.parametrize("cuts", [[], [0], [3, 2], [2, 2], [9]])
def test_impossible_cuts_are_refused(cuts):
    with pytest.raises(EntmtpError, match="must ascend within"):
        layout(cuts, 3, 8)


def test_chat_rows_start_in_the_answer_and_end_with_the_last_block():
    one = text_layout(prompt=5, length=20, k=3, spacing=6, shift=2, most=10)
    assert [one.positions[places[0]] + 1 for places in one.predict] == [7, 13, 19]
    assert max(p for p, b in zip(one.positions, one.block, strict=True) if b == REAL) == 18
    assert len(text_layout(5, 20, 3, 6, 2, most=2).predict) == 2
    assert text_layout(5, 6, 3, 6, 2, 10) is None


def test_who_sees_whom():
    one = paper_layout(18, 3, 3, -2)
    block = torch.tensor([[*one.block, PADDING, PADDING]])
    sees = block_mask(block)[0]
    for i in range(20):
        for j in range(20):
            a, b = int(block[0, i]), int(block[0, j])
            expected = i == j or (j < i and b == REAL) or (j < i and a >= 0 and a == b)
            assert bool(sees[i, j]) == expected, (i, j)
    assert sees.any(dim=1).all()  # nobody's softmax is empty
    assert not sees[:18, 18:].any()  # and nobody sees the padding but itself


@pytest.fixture(scope="module")
def model(tiny_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()


def run(model, batch, ids):
    mask = torch.zeros(batch.mask.shape).masked_fill(~batch.mask, torch.finfo(torch.float32).min)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, position_ids=batch.positions).logits


def plain(model, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


def case(model):
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(8, 200, (n,), generator=generator).tolist() for n in (20, 14)]
    layouts = [layout([3, 9, 15, 20], 4, 20), layout([1, 8], 4, 14)]
    return texts, layouts, pack(texts, layouts, MASK_ID)


def test_masks_change_nothing_for_real_tokens(model):
    texts, layouts, batch = case(model)
    logits = run(model, batch, batch.ids)
    for row, (text, one) in enumerate(zip(texts, layouts, strict=True)):
        real = [place for place, block in enumerate(one.block) if block == REAL]
        assert torch.allclose(logits[row, real], plain(model, text), atol=1e-4)


def test_a_block_predicts_what_decoding_would_read(model):
    """Packed among others or appended alone to the text before it: the same logits."""
    texts, layouts, batch = case(model)
    logits = run(model, batch, batch.ids)
    for row, (text, one) in enumerate(zip(texts, layouts, strict=True)):
        for places in one.predict:
            cut = one.positions[places[0]] + 1
            alone = plain(model, text[:cut] + [MASK_ID] * 3)[cut - 1 :]
            assert torch.allclose(logits[row, places], alone, atol=1e-4)


def test_forced_tokens_stand_where_the_masks_stood(model):
    texts, layouts, batch = case(model)
    chosen = torch.arange(100, 100 + batch.predict.numel()).view(batch.predict.shape)
    ids = batch.forced(chosen[batch.real])
    assert not (ids == MASK_ID).any()
    for row, (text, one) in enumerate(zip(texts, layouts, strict=True)):
        for number, places in enumerate(one.predict):
            assert ids[row, places[1:]].tolist() == chosen[row, number, :-1].tolist()
            cut = one.positions[places[0]] + 1
            forced = plain(model, text[:cut] + chosen[row, number, :-1].tolist())[cut - 1 :]
            assert torch.allclose(run(model, batch, ids)[row, places], forced, atol=1e-4)
        real = [place for place, block in enumerate(one.block) if block == REAL]
        assert ids[row, real].tolist() == text
