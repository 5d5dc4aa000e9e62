from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the example needs torch: install the extra `train`")

from prorl_zmq.examples.train_torch.model import KeyValueCache, Model, ModelShape

SHAPE = ModelShape(vocabulary=32, context=24, width=32, layers=2, heads=2, inner=48)
LENGTHS = (5, 1, 9)
ADDED = 6


def whole(model: Model, conversations: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model.logits(model.hidden(conversations))


def test_decoding_with_the_cache_is_the_full_forward_pass() -> None:
    model = Model(SHAPE, seed=3)
    longest = max(LENGTHS) + ADDED
    conversations = torch.randint(32, (len(LENGTHS), longest), generator=torch.Generator().manual_seed(0))
    expected = whole(model, conversations)
    cache, lengths = KeyValueCache.empty(SHAPE, 5, torch.device("cpu")), torch.tensor(LENGTHS)
    prompts = conversations[:, : max(LENGTHS)].clone()
    prompts[torch.arange(max(LENGTHS)) >= lengths[:, None]] = 7  # padding may be anything
    rows = torch.arange(len(LENGTHS))
    with torch.inference_mode():
        scores = model.prefill(prompts[:2], lengths[:2], cache, 0)
        scores = torch.cat([scores, model.prefill(prompts[2:], lengths[2:], cache, 2)])
        for _ in range(ADDED):
            torch.testing.assert_close(scores, expected[rows, lengths - 1], atol=1e-5, rtol=0)
            scores = model.decode(conversations[rows, lengths], lengths, cache)
            lengths = lengths + 1
        torch.testing.assert_close(scores, expected[rows, lengths - 1], atol=1e-5, rtol=0)


def test_a_conversation_goes_on_in_another_row() -> None:
    model = Model(SHAPE, seed=3)
    conversation = torch.arange(1, 9)[None]
    cache = KeyValueCache.empty(SHAPE, 3, torch.device("cpu"))
    with torch.inference_mode():
        model.prefill(conversation[:, :7], torch.tensor([7]), cache, 2)
        cache.move(2, 0)
        scores = model.decode(conversation[0, 7:8], torch.tensor([7]), cache)
    torch.testing.assert_close(scores, whole(model, conversation)[:, -1], atol=1e-5, rtol=0)


def test_a_token_sees_its_place_and_nothing_behind_it() -> None:
    model = Model(SHAPE, seed=3)
    one, other = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 2, 3, 9]])
    torch.testing.assert_close(whole(model, one)[:, :3], whole(model, other)[:, :3])
    swapped = whole(model, torch.tensor([[2, 1, 3, 4]]))
    assert (swapped[:, 2:] - whole(model, one)[:, 2:]).abs().max() > 1e-3


def test_a_seed_gives_the_same_model_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    models = [Model(SHAPE, seed=seed) for seed in (1, 1, 2)]
    parameters = [torch.cat([p.detach().flatten() for p in model.parameters() if p.dim() == 2]) for model in models]
    assert torch.equal(parameters[0], parameters[1])
    assert not torch.equal(parameters[0], parameters[2])
    assert torch.rand(1) == expected


def test_the_default_is_below_a_million_parameters() -> None:
    assert 50_000 < sum(p.numel() for p in Model().parameters()) < 1_000_000
