"""The multi-sample LM head: scaling, votes, ties, blocks, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from dropmatch.config import DropoutConfig
from dropmatch.core import head as head_module
from dropmatch.core.head import HeadEnsemble, MCDropoutHead, majority_vote, point_mass_divergence
from dropmatch.errors import ConfigError
from dropmatch.ops.divergence import js_divergence
from dropmatch.ops.random import dropout_masks
from scripted import ScriptedModel, TableHead

FLOAT32 = 1e-5  # logits of size about 10 from sums of a few dozen float32 terms
MONTE_CARLO = 0.1  # five standard errors of the mean logit over 20,000 paths, see the test


def _argmax(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def _keys(M: int, seed: int = 0) -> torch.Tensor:
    return torch.stack([torch.full((M,), seed), torch.zeros(M), torch.arange(M)], dim=1).long()


def _hidden(M: int, d: int = 24, seed: int = 0) -> torch.Tensor:
    return torch.randn(M, d, generator=torch.Generator().manual_seed(seed))


def _head(p_drop: float = 0.3, K: int = 5, **options: object) -> MCDropoutHead:
    return MCDropoutHead(ScriptedModel(16, 24).head, DropoutConfig(p_drop=p_drop, num_paths=K), **options)


def _ask(head: MCDropoutHead, hidden: torch.Tensor, **options: object) -> HeadEnsemble:
    return head(hidden, _keys(len(hidden)), pick=_argmax, **options)


def test_without_dropout_every_path_is_the_plain_head() -> None:
    head, hidden = _head(p_drop=0.0), _hidden(30)
    heads = _ask(head, hidden, with_js=True, keep_centroid=True)
    plain = head.head(hidden)
    assert torch.equal(heads.tokens, plain.argmax(-1, keepdim=True).expand(30, 5))
    assert torch.equal(heads.majority, plain.argmax(-1))
    assert bool((heads.votes == 5).all())
    assert bool((heads.radius == 0).all())
    assert torch.allclose(heads.centroid_logits, plain, rtol=0, atol=FLOAT32)


def test_kept_coordinates_are_scaled_up_by_the_drop_rate() -> None:
    """Eq. 2: h * m / (1 - p), coordinate by coordinate."""
    head, hidden = _head(p_drop=0.3), _hidden(4)
    masks = dropout_masks(_keys(4), 5, 24, 0.3)
    for m in range(4):
        for k in range(5):
            dropped = torch.where(masks[m, k], hidden[m] / 0.7, 0.0)
            expected = head.head.weight @ dropped
            assert torch.allclose(head.path_logits(hidden, masks)[m, k], expected, rtol=0, atol=FLOAT32)


def test_mean_of_many_paths_is_the_plain_head() -> None:
    """Inverted dropout is unbiased. Seed 0; a logit varies by sqrt(p/(1-p)) * |w * h| <= 2.7 here, so the standard
    error over 20,000 paths is below 0.02; false alarm below 1e-5 over 16 logits."""
    head, hidden = _head(p_drop=0.3, K=20_000), _hidden(1)
    logits = head.keyed_logits(hidden, _keys(1))[0]
    assert float((logits.mean(0) - head.head(hidden)[0]).abs().max()) < MONTE_CARLO


def test_centroid_is_the_mean_of_logits_not_of_probabilities() -> None:
    head, hidden = _head(), _hidden(20)
    heads = _ask(head, hidden, with_js=True, keep_centroid=True)
    logits = head.keyed_logits(hidden, _keys(20))
    centroid = logits.mean(1).softmax(-1)
    assert torch.allclose(heads.centroid_logits, logits.mean(1), rtol=0, atol=FLOAT32)
    expected = torch.stack([js_divergence(logits[:, k].softmax(-1), centroid) for k in range(5)], dim=1)
    assert torch.allclose(heads.js_heads, expected, rtol=0, atol=FLOAT32)
    assert torch.equal(heads.radius, heads.js_heads.amax(-1))
    mean_of_probs = logits.softmax(-1).mean(1)
    assert float((mean_of_probs - centroid).abs().max()) > 0.01  # the two readings differ on these states


def test_non_linear_head_averages_its_capped_logits() -> None:
    class SoftCapped(TableHead):
        is_linear = False

        def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
            return 2.0 * torch.tanh(super().__call__(hidden) / 2.0)

    capped = SoftCapped(ScriptedModel(16, 24).head.weight)
    head = MCDropoutHead(capped, DropoutConfig(p_drop=0.3))
    heads = _ask(head, _hidden(5), keep_centroid=True)
    expected = head.keyed_logits(_hidden(5), _keys(5)).mean(1)
    assert torch.allclose(heads.centroid_logits, expected, rtol=0, atol=FLOAT32)
    assert float(expected.abs().max()) <= 2.0


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = _hidden(13)
    draft = torch.randn(13, 16, generator=torch.Generator().manual_seed(1)).log_softmax(-1)

    def ask() -> HeadEnsemble:
        options = {"with_js": True, "keep_centroid": True, "draft_log_probs": lambda index: draft[index]}
        return _ask(_head(), hidden, process=lambda logits, index: logits + index[:, None, None], **options)

    whole = ask()
    monkeypatch.setattr(head_module, "_BYTES_CAP", 4 * 4 * 5 * 16)  # four positions at a time
    blocks = ask()
    for name in ("tokens", "majority", "votes", "js_heads", "js_draft", "centroid_logits"):
        assert torch.equal(getattr(whole, name), getattr(blocks, name)), name


def test_result_at_a_position_does_not_depend_on_the_others() -> None:
    head, hidden, keys = _head(), _hidden(6), _keys(6)
    together = head(hidden, keys, pick=_argmax, with_js=True)
    for m in range(6):
        alone = head(hidden[m : m + 1], keys[m : m + 1], pick=_argmax, with_js=True)
        assert torch.equal(alone.tokens[0], together.tokens[m])
        assert torch.allclose(alone.js_heads[0], together.js_heads[m], rtol=0, atol=FLOAT32)


def test_given_masks_replace_the_keyed_ones() -> None:
    head, hidden = _head(), _hidden(3)
    everything = torch.ones(3, 5, 24, dtype=torch.bool)
    heads = _ask(head, hidden, masks=everything, keep_centroid=True)
    assert torch.allclose(heads.centroid_logits, head.head(hidden) / 0.7, rtol=0, atol=FLOAT32)


def test_divergences_are_computed_only_on_request() -> None:
    heads = _ask(_head(), _hidden(2))
    assert heads.radius is None
    assert heads.js_heads is None
    assert heads.js_draft is None
    assert heads.centroid_logits is None


def test_head_counts_the_positions_it_was_asked_about() -> None:
    head = _head()
    _ask(head, _hidden(3))
    _ask(head, _hidden(4))
    assert head.rows_asked == 7


def test_half_precision_head_decides_in_float32() -> None:
    head = MCDropoutHead(TableHead(ScriptedModel(16, 24).head.weight.bfloat16()), DropoutConfig(p_drop=0.3))
    heads = _ask(head, _hidden(4).bfloat16(), with_js=True, keep_centroid=True)
    assert heads.centroid_logits.dtype == torch.float32
    assert heads.js_heads.dtype == torch.float32


def test_plurality_wins_without_an_absolute_majority() -> None:
    winner, votes = majority_vote(torch.tensor([[3, 1, 3, 2, 4]]), torch.zeros(1, 5))
    assert (int(winner), int(votes)) == (3, 2)


@pytest.mark.parametrize(
    ("tokens", "centroid", "tie", "expected"),
    [
        ([7, 7, 2, 2, 5], [1.0, 1.0, 3.0, 3.0, 9.0], "centroid", 2),  # 5 has the largest logit but fewer votes
        ([7, 7, 2, 2, 5], [1.0, 1.0, 1.0, 1.0, 9.0], "centroid", 2),  # equal centroid: the lower id
        ([7, 7, 2, 2, 5], [1.0, 1.0, 3.0, 3.0, 9.0], "path", 7),  # the lowest path index that names a winner
        ([5, 2, 7, 7, 2], [0.0] * 5, "path", 2),
        ([4, 3, 2, 1, 0], [0.0, 0.0, 5.0, 0.0, 0.0], "centroid", 2),
        ([4, 3, 2, 1, 0], [0.0, 0.0, 5.0, 0.0, 0.0], "path", 4),
    ],
)
def test_tied_votes_are_broken_as_documented(tokens: list[int], centroid: list[float], tie: str, expected: int) -> None:
    winner, _ = majority_vote(torch.tensor([tokens]), torch.tensor([centroid]), tie)
    assert int(winner) == expected


def test_vote_survives_tokens_whose_centroid_is_masked() -> None:
    """With a processor that masks tokens, all votes can fall on logits of -inf."""
    winner, votes = majority_vote(torch.tensor([[3, 3, 1]]), torch.full((1, 3), float("-inf")))
    assert (int(winner), int(votes)) == (3, 2)


def test_point_mass_divergence_equals_the_one_hot_distribution() -> None:
    logits = torch.randn(9, 9, generator=torch.Generator().manual_seed(2))
    got = point_mass_divergence(logits, torch.arange(9))
    assert torch.allclose(got, js_divergence(torch.eye(9), logits.softmax(-1)), rtol=0, atol=FLOAT32)


def test_auto_drop_rate_must_be_settled_first() -> None:
    with pytest.raises(ConfigError, match="choose_p_drop"):
        MCDropoutHead(ScriptedModel().head, DropoutConfig(p_drop="auto"))
