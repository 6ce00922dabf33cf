"""Counter-based Gumbel noise and the chooser."""

import pytest
import torch

from entmtp.decoding.sampling import Choices, Chooser, GumbelNoise


def test_noise_is_a_function_of_seed_prompt_and_position():
    row = GumbelNoise(0, "a", 50).row(7)
    assert torch.equal(GumbelNoise(0, "a", 50).row(7), row)
    others = [GumbelNoise(1, "a", 50).row(7), GumbelNoise(0, "b", 50).row(7), GumbelNoise(0, "a", 50).row(8)]
    for other in others:
        assert not torch.any(other == row)
    # a seed and a prompt id must not run into each other: (1, "2x") and (12, "x") are different keys
    assert not torch.equal(GumbelNoise(1, "2x", 50).row(7), GumbelNoise(12, "x", 50).row(7))


def test_rows_of_neighbouring_positions_do_not_overlap():
    """A stream that merely starts one draw later would make position p + 1 a shifted copy of position p."""
    noise = GumbelNoise(3, "p", 400)
    values = torch.cat([noise.row(position) for position in range(20)])
    assert len(values.unique()) > 0.999 * len(values)


def test_order_of_asking_and_forgetting_do_not_matter():
    fresh = {position: GumbelNoise(5, "x", 20).row(position) for position in range(12)}
    noise = GumbelNoise(5, "x", 20, keep=3)
    for position in [4, 5, 6, 5, 7, 8, 2, 9, 0, 5, 11, 10, 9, 4]:
        assert torch.equal(noise.row(position), fresh[position])
        assert len(noise.rows) <= 3


def test_gumbel_max_draws_from_the_softmax():
    """Chi-squared over 5000 positions, 7 degrees of freedom; 29.9 is exceeded with probability 1e-4."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.3, 0.0, -0.5, -1.0, 0.7])
    temperature, count = 0.7, 5000
    chooser = Chooser(temperature, GumbelNoise(11, "chi", len(logits)))
    chosen = torch.tensor([chooser(logits[None], [position])[0] for position in range(count)])
    observed = torch.bincount(chosen, minlength=len(logits)).double()
    expected = count * (logits.double() / temperature).softmax(dim=-1)
    assert float(((observed - expected) ** 2 / expected).sum()) < 29.9


def test_noise_is_standard_gumbel():
    values = torch.cat([GumbelNoise(2, "g", 1000).row(position) for position in range(20)]).double()
    assert float(values.mean()) == pytest.approx(0.5772, abs=0.03)
    assert float(values.var()) == pytest.approx(torch.pi**2 / 6, abs=0.06)


def test_every_row_gets_its_own_positions_noise():
    noise = GumbelNoise(0, "a", 6)
    chooser = Chooser(0.5, noise)
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    scores = chooser.scores(logits, [9, 4, 9])
    for row, position in enumerate([9, 4, 9]):
        torch.testing.assert_close(scores[row], logits[row].float() / 0.5 + noise.row(position))
    assert chooser(logits, [9, 4, 9]) == scores.argmax(dim=-1).tolist()


def test_greedy_chooser_is_argmax():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 5.0, 1.0]])
    assert Chooser()(logits, [0, 1]) == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 511, 512, 513, 5000])
def test_choices_are_argmax_at_any_size(dtype, size):
    logits = torch.randn(6, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    logits[4] = float("-inf")
    logits[4, size // 2] = -3.0
    first = [row.index(max(row)) for row in logits.tolist()]
    assert Chooser()(logits, [0] * 6) == first


def test_choices_are_made_for_the_nodes_that_are_asked_for():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    chooser = Chooser(0.7, GumbelNoise(0, "a", 40))
    every, choices = chooser(logits, [3, 4, 4, 5, 6]), Choices(chooser, logits, [3, 4, 4, 5, 6])
    assert [choices[node] for node in (2, 4, 2)] == [every[node] for node in (2, 4, 2)]
    assert set(choices) == {2, 4}


def test_chooser_arguments():
    with pytest.raises(ValueError, match="needs both"):
        Chooser(0.7)
    with pytest.raises(ValueError, match="needs both"):
        Chooser(0.0, GumbelNoise(0, "a", 5))
