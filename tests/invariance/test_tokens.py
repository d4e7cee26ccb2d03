"""Log-probabilities and tokens that are a sequence's own."""

from __future__ import annotations

import pytest
import torch

from dash_attn import invariance
from dash_attn.call.dropout import GAMMA, _mix
from dash_attn.invariance.tokens import noise
from dense import same_bits

VOCABULARY = 97


def logits_of(rows: int) -> torch.Tensor:
    return 2 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(0))


def test_log_probabilities() -> None:
    logits, tokens = logits_of(40).view(4, 10, VOCABULARY), torch.arange(40).view(4, 10)
    found = invariance.log_probs(logits, tokens, temperature=0.7)
    torch.testing.assert_close(found, (logits / 0.7).log_softmax(-1).gather(-1, tokens[..., None])[..., 0])
    assert same_bits(invariance.log_probs(logits[1, 2], tokens[1, 2], temperature=0.7), found[1, 2])
    assert same_bits(invariance.log_probs(logits.bfloat16(), tokens), invariance.log_probs(logits.bfloat16().float(), tokens))
    assert invariance.log_probs(logits[:0], tokens[:0]).shape == (0, 10)
    with pytest.raises(ValueError, match=r"got \(4, 10, 97\) for \(40,\)"):
        invariance.log_probs(logits, tokens.flatten())


def test_log_probabilities_have_a_gradient() -> None:
    logits = logits_of(3).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: invariance.log_probs(x, torch.tensor([1, 2, 3])).double(), logits, eps=1e-3, atol=1e-2)


def test_a_token_depends_on_seed_and_place_alone() -> None:
    logits, seeds = logits_of(6), torch.tensor([3, -1, 2**62, 0, 5, 6])
    together = invariance.sample(logits, seeds, 4)
    for row in range(6):
        assert invariance.sample(logits[row : row + 1], seeds[row : row + 1], 4) == together[row]
    assert torch.equal(invariance.sample(logits, seeds, torch.full((6,), 4)), together)
    drawn = {tuple(invariance.sample(logits, seeds + shift, place).tolist()) for shift in (0, 1) for place in range(10)}
    assert len(drawn) == 20
    with pytest.raises(ValueError, match=r"an int64 seed per row; got \(6, 97\) and \(6,\), torch.float32"):
        invariance.sample(logits, seeds.float(), 4)


def test_what_has_no_tokens_raises() -> None:
    logits, seeds = logits_of(2), torch.arange(2)
    for compute in (lambda: invariance.sample(logits, seeds, 0, 0.0), lambda: invariance.log_probs(logits, seeds, -1.0)):
        with pytest.raises(ValueError, match=r"temperature must be above 0; got .*: the largest logit is logits.argmax\(-1\)"):
            compute()


def test_seeded_tokens_are_of_one_call() -> None:
    """Else a token would depend on what was generated before; and one seed would be that of all sequences."""
    tokens = torch.ones(2, 9, dtype=torch.int64)
    drawn = invariance.SeededTokens(torch.arange(2))
    first = drawn(tokens[:, :5], logits_of(2))
    assert same_bits(first, logits_of(2) + noise(torch.arange(2), 0, VOCABULARY))
    drawn(tokens[:, :6], logits_of(2))
    with pytest.raises(ValueError, match="for one call of generate, token by token; got 2 sequences of 9 tokens behind 6"):
        drawn(tokens, logits_of(2))
    with pytest.raises(ValueError, match=r"has 1 seeds, one per sequence, .* got 2 sequences of 9 tokens"):
        invariance.SeededTokens(torch.arange(1))(tokens, logits_of(2))


def test_tokens_come_as_often_as_they_should() -> None:
    count, logits = 200_000, torch.tensor([0.0, 1.0, 2.0, -1.0])
    for temperature in (1.0, 2.0):
        drawn = invariance.sample(logits.expand(count, 4), torch.arange(count), 7, temperature)
        expected = (logits / temperature).softmax(0)
        found = torch.bincount(drawn, minlength=4) / count
        assert ((found - expected).abs() < 5 * (expected / count).sqrt()).all()
    drawn = invariance.sample(logits.expand(count, 4), torch.full((count,), 1), torch.arange(count))
    assert ((torch.bincount(drawn, minlength=4) / count - logits.softmax(0)).abs() < 5 * (logits.softmax(0) / count).sqrt()).all()


def test_numbers_are_those_of_the_definition() -> None:
    seed, place, entry = -12345, 9, 3
    number = _mix(_mix(_mix(seed & 2**64 - 1) + (place + 1) * GAMMA) + (entry + 1) * GAMMA)
    uniform = torch.tensor(((number >> 32) + 0.5) / 2**32, dtype=torch.float64)
    assert noise(torch.tensor([seed]), place, 5)[0, entry] == (-(-uniform.log()).log()).float()
