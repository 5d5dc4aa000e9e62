from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from prorl_zmq.errors import InvalidWeights
from prorl_zmq.inference.policy import Adam, Policy, PolicyShape, draw, log_softmax, logprob_slopes

from .conftest import rounding

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_log_probs_are_normalised_and_need_only_what_came_before(policy: Policy) -> None:
    token_ids = np.random.default_rng(0).integers(0, 50, 30, np.int32)
    contexts = policy.contexts(token_ids)
    np.testing.assert_allclose(np.exp(log_softmax(policy.logits(contexts))).sum(axis=1), 1, atol=1e-5)
    logprobs = policy.logprobs(token_ids)
    assert logprobs.shape == (30,)
    assert logprobs.dtype == np.float32
    np.testing.assert_allclose(policy.logprobs(token_ids[:20]), logprobs[:20], atol=rounding(policy, token_ids))
    assert contexts[10].tolist() == token_ids[2:10].tolist()
    assert contexts[0].tolist() == [0] * 8


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_is_that_of_finite_differences(policy: Policy, temperature: float) -> None:
    # In float64, so that the differences are exact enough to compare.
    exact = Policy({name: value.astype(np.float64) for name, value in policy.parameters.items()})  # type: ignore[misc]
    random = np.random.default_rng(0)
    contexts = random.integers(0, 50, (20, 8), np.int32)
    targets = random.integers(0, 50, 20, np.int32)
    weights: Any = random.normal(size=20)

    def objective() -> float:
        chosen = log_softmax(exact.logits(contexts), temperature)[np.arange(20), targets]
        return float((weights * chosen).sum())

    forward = exact.forward(contexts)
    slopes = logprob_slopes(log_softmax(forward.logits, temperature), targets, weights, temperature)
    gradient = exact.gradient(forward, slopes)
    for name, parameter in exact.parameters.items():
        assert gradient[name].shape == parameter.shape
        flat = parameter.reshape(-1)
        for index in random.integers(0, flat.size, 10):
            value = flat[index]
            flat[index] = value + 1e-5
            above = objective()
            flat[index] = value - 1e-5
            below = objective()
            flat[index] = value
            assert gradient[name].reshape(-1)[index] == pytest.approx((above - below) / 2e-5, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_their_log_probs_say(policy: Policy, temperature: float) -> None:
    random = np.random.default_rng(1)
    count = 20_000
    logits = np.repeat(policy.logits(np.arange(8, dtype=np.int32)[None]), count, axis=0)
    tokens, logprobs = draw(logits, np.full(count, temperature), random.random(count))
    probabilities = np.exp(log_softmax(logits[:1], temperature)[0])
    np.testing.assert_allclose(np.exp(logprobs), probabilities[tokens], rtol=1e-4)
    np.testing.assert_allclose(np.bincount(tokens, minlength=50) / count, probabilities, atol=0.015)


def test_temperature_0_takes_the_likeliest_token_with_its_own_log_prob(policy: Policy) -> None:
    logits = policy.logits(np.random.default_rng(0).integers(0, 50, (5, 8), np.int32))
    tokens, logprobs = draw(logits, np.zeros(5), np.full(5, 0.99))
    assert tokens.tolist() == logits.argmax(axis=1).tolist()
    np.testing.assert_allclose(logprobs, log_softmax(logits).max(axis=1))


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 100.0])
@pytest.mark.parametrize("uniform", [0.0, np.nextafter(1, 0)])
def test_extreme_temperatures_and_random_numbers_are_finite(policy: Policy, temperature: float, uniform: float) -> None:
    tokens, logprobs = draw(policy.logits(np.zeros((1, 8), np.int32)), np.array([temperature]), np.array([uniform]))
    assert 0 <= tokens[0] < 50
    assert np.isfinite(logprobs[0])


def test_adam_climbs(policy: Policy) -> None:
    adam = Adam(policy, 0.01)
    contexts = np.arange(8, dtype=np.int32)[None]
    target, weight = np.array([7], np.int32), np.ones(1, np.float32)
    for _ in range(50):
        forward = policy.forward(contexts)
        norm = adam.step(policy.gradient(forward, logprob_slopes(log_softmax(forward.logits), target, weight)))
        assert np.isfinite(norm)
    assert log_softmax(policy.logits(contexts))[0, 7] > np.log(0.9)


def test_the_same_seed_gives_the_same_policy() -> None:
    first, second, other = (Policy.initial(PolicyShape(20, 4, 4, 8), seed) for seed in (1, 1, 2))
    assert first.shape == PolicyShape(20, 4, 4, 8)
    for name, value in first.parameters.items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, second.parameters[name])
    assert (first.parameters["embedding"] != other.parameters["embedding"]).any()


def test_a_copy_shares_nothing(policy: Policy) -> None:
    copy = policy.copy()
    copy.parameters["output_bias"] += 1
    assert not policy.parameters["output_bias"].any()


def test_saved_weights_are_loaded_bit_for_bit(policy: Policy, tmp_path: Path) -> None:
    path = tmp_path / "weights.npz"
    policy.save(path)
    policy.save(path)
    loaded = Policy.load(path, policy.shape)
    for name, value in policy.parameters.items():
        np.testing.assert_array_equal(loaded.parameters[name], value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["weights.npz"], "no temporary file is left"


def test_a_save_that_fails_leaves_the_old_file(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.npz"
    policy.save(path)
    before = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        policy.save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["weights.npz"]


def _without(parameters: dict[str, Any]) -> None:
    del parameters["embedding"]


def _doubled(parameters: dict[str, Any]) -> None:
    parameters["embedding"] = parameters["embedding"].astype(np.float64)


def _infinite(parameters: dict[str, Any]) -> None:
    parameters["output_bias"][3] = np.inf


def _disagreeing(parameters: dict[str, Any]) -> None:
    parameters["output_bias"] = parameters["output_bias"][:-1]


def _flat(parameters: dict[str, Any]) -> None:
    parameters["hidden_weight"] = parameters["hidden_weight"].reshape(-1)


def _smaller(parameters: dict[str, Any]) -> None:
    small = Policy.initial(PolicyShape(50, window=7, embedding=4, hidden=16), 0)
    parameters.update(small.parameters)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (_without, "the arrays are"),
        (_doubled, "embedding is float64"),
        (_infinite, "output_bias holds numbers that are not finite"),
        (_disagreeing, "output_bias has shape"),
        (_flat, "hidden_weight has shape"),
        (_smaller, r"hidden_weight has shape \(7, 4, 16\), not \(8, 4, 16\)"),
    ],
)
def test_other_arrays_are_refused_by_name(
    policy: Policy, tmp_path: Path, spoil: Callable[[dict[str, Any]], None], problem: str
) -> None:
    path = tmp_path / "bad.npz"
    parameters: dict[str, Any] = policy.copy().parameters
    spoil(parameters)
    np.savez(path, allow_pickle=False, **parameters)
    with pytest.raises(InvalidWeights, match=problem) as caught:
        Policy.load(path, policy.shape)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("content", [None, b"", b"not a zip", b"PK\x03\x04 cut off", "array", "object", "cut"])
def test_files_that_are_no_weights_are_refused(policy: Policy, tmp_path: Path, content: bytes | str | None) -> None:
    path = tmp_path / "bad.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "array":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    elif content == "object":
        np.savez(path, embedding=np.array([{"a": 1}], dtype=object), allow_pickle=True)
    elif content == "cut":
        policy.save(path)
        whole = path.read_bytes()
        path.write_bytes(whole[:200] + bytes(100) + whole[300:])
    with pytest.raises(InvalidWeights, match=r"bad\.npz") as caught:
        Policy.load(path)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_a_path_that_is_no_regular_file_blocked_its_reader(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "weights.npz"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(InvalidWeights, match="not a regular file"):
        Policy.load(path)
