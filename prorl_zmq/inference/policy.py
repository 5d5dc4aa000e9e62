"""A small real language model in numpy: the embedded engine serves it and the demo trains it.

The last `window` tokens are embedded, concatenated and passed through one hidden tanh layer; a softmax gives the next
token (Bengio et al., 2003). All arrays are float32 and the log-probs exact: sampling reports those of the distribution
it drew from. No attention, no recurrence, no GPU: it makes the whole pipeline learn on two cores. Only its `Adam`
mutates a `Policy`; an engine swaps whole policies.
"""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_limits

from ..errors import InvalidWeights
from ..system.files import open_regular
from .tokenizer import PAD, VOCABULARY_SIZE

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Ints = NDArray[np.int32]

DIMENSIONS = {
    "embedding": ("vocabulary", "embedding"),
    "hidden_weight": ("window", "embedding", "hidden"),
    "hidden_bias": ("hidden",),
    "output_weight": ("hidden", "vocabulary"),
    "output_bias": ("vocabulary",),
}
"""The parameters' names and the meaning of their axes."""
HIDDEN_GAIN = 4.0
"""Standard deviation of an untrained hidden unit's input."""


@dataclass(frozen=True, slots=True)
class PolicyShape:
    vocabulary: int = VOCABULARY_SIZE
    window: int = 16
    """Number of earlier tokens that the next one can depend on."""
    embedding: int = 6
    hidden: int = 256

    def of(self, name: str) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in DIMENSIONS[name])


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """One forward pass over B contexts, with the values that the gradient needs."""

    contexts: Ints
    """int32 [B, window]."""
    features: Floats
    """float32 [B, window * embedding]."""
    hidden: Floats
    """float32 [B, hidden]."""
    logits: Floats
    """float32 [B, vocabulary]."""


class Policy:
    """The model's parameters and the functions of them."""

    def __init__(self, parameters: dict[str, Floats]) -> None:
        self.parameters = parameters
        window, embedding, hidden = parameters["hidden_weight"].shape
        self.shape = PolicyShape(parameters["embedding"].shape[0], window, embedding, hidden)

    @classmethod
    def initial(cls, shape: PolicyShape, seed: int) -> Policy:
        """Return an untrained policy, determined by the seed."""
        random = np.random.default_rng(seed)
        # Wide hidden weights separate contexts that differ in few tokens. With output weights of zero, all tokens
        # that training never shows stay equally unlikely.
        widths = {"embedding": 1.0, "hidden_weight": HIDDEN_GAIN / np.sqrt(shape.window * shape.embedding)}
        return cls(
            {
                name: np.float32(widths.get(name, 0.0)) * random.standard_normal(shape.of(name), np.float32)
                for name in DIMENSIONS
            }
        )

    def copy(self) -> Policy:
        """Return a policy with its own copy of the parameters."""
        return Policy({name: value.copy() for name, value in self.parameters.items()})

    def contexts(self, token_ids: Ints) -> Ints:
        """Return the context of each position, int32 [T, window]: the tokens before it, padded in front."""
        padded = np.concatenate([np.full(self.shape.window, PAD, np.int32), token_ids[:-1]])
        return np.lib.stride_tricks.sliding_window_view(padded, self.shape.window)[: len(token_ids)]

    def forward(self, contexts: Ints) -> Forward:
        """Run the model over contexts, int32 [B, window]."""
        parameters = self.parameters
        features = parameters["embedding"][contexts].reshape(len(contexts), -1)
        weight = parameters["hidden_weight"].reshape(features.shape[1], -1)
        hidden = np.tanh(features @ weight + parameters["hidden_bias"])
        logits = hidden @ parameters["output_weight"] + parameters["output_bias"]
        return Forward(contexts, features, hidden, logits)

    def logits(self, contexts: Ints) -> Floats:
        """Return the next token's logits after each context: int32 [B, window] to float32 [B, vocabulary]."""
        return self.forward(contexts).logits

    def logprobs(self, token_ids: Ints, temperature: float = 1.0) -> Floats:
        """Return each token's log-prob given those before it: int32 [T] to float32 [T]."""
        return log_softmax(self.logits(self.contexts(token_ids)), temperature)[np.arange(len(token_ids)), token_ids]

    def gradient(self, forward: Forward, by_logit: Floats) -> dict[str, Floats]:
        """Return the gradient, by parameter, of an objective whose derivatives by the logits are `by_logit`."""
        parameters = self.parameters
        by_hidden = (by_logit @ parameters["output_weight"].T) * (1.0 - forward.hidden**2)
        weight = parameters["hidden_weight"].reshape(forward.features.shape[1], -1)
        by_feature = (by_hidden @ weight.T).reshape(-1, self.shape.embedding)
        return {
            "embedding": self._sum_by_token(forward.contexts.ravel(), by_feature),
            "hidden_weight": (forward.features.T @ by_hidden).reshape(parameters["hidden_weight"].shape),
            "hidden_bias": by_hidden.sum(axis=0),
            "output_weight": forward.hidden.T @ by_logit,
            "output_bias": by_logit.sum(axis=0),
        }

    def save(self, path: Path) -> None:
        """Write the parameters to `path` (.npz); readers see the old file or the complete new one."""
        save_arrays(path, self.parameters)

    @classmethod
    def load(cls, path: Path, shape: PolicyShape | None = None) -> Policy:
        """Read the parameters from `path`.

        Raises:
            InvalidWeights: the file is missing, unreadable or not a regular file, or has other names, types or sizes,
                or non-finite numbers.
        """
        try:
            with open(path, "rb", opener=open_regular) as file, np.load(file, allow_pickle=False) as arrays:
                parameters = dict(arrays)
        except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
            raise InvalidWeights(f"{path} cannot be read as an .npz of weights: {error}", path=str(path)) from error
        problem = _problem(parameters, shape)
        if problem:
            raise InvalidWeights(f"{path} holds no usable weights: {problem}", path=str(path))
        return cls(parameters)

    def _sum_by_token(self, token_ids: Ints, rows: Floats) -> Floats:
        """Sum the rows of each token; sorted runs, since `np.add.at` takes several times as long."""
        order = np.argsort(token_ids, kind="stable")
        tokens, starts = np.unique(token_ids[order], return_index=True)
        sums = np.zeros_like(self.parameters["embedding"])
        sums[tokens] = np.add.reduceat(rows[order], starts, axis=0)
        return sums


class Adam:
    """Gradient ascent on a policy's parameters, in place (Kingma and Ba, 2015)."""

    def __init__(self, policy: Policy, learning_rate: float, max_norm: float = 1.0, epsilon: float = 1e-5) -> None:
        self.learning_rate = learning_rate
        self._policy = policy
        self._max_norm = max_norm
        self._epsilon = np.float32(epsilon)
        self._mean = {name: np.zeros_like(value) for name, value in policy.parameters.items()}
        self._square = {name: np.zeros_like(value) for name, value in policy.parameters.items()}
        self._steps = 0

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that `load_state` continues from; they are not copied."""
        moments = {"adam.mean": self._mean, "adam.square": self._square}
        arrays = {f"{kind}.{name}": value for kind, values in moments.items() for name, value in values.items()}
        return {**arrays, "adam.steps": np.array(self._steps)}

    def load_state(self, state: dict[str, NDArray[Any]]) -> None:
        """Continue from the arrays of `state`, which may be among others."""
        for kind, values in (("adam.mean", self._mean), ("adam.square", self._square)):
            for name, value in values.items():
                value[...] = state[f"{kind}.{name}"]
        self._steps = int(state["adam.steps"])

    def step(self, gradient: dict[str, Floats]) -> float:
        """Move the parameters along the gradient; return the gradient's norm before clipping."""
        norm = float(np.sqrt(sum(float(np.sum(value**2)) for value in gradient.values())))
        scale = np.float32(min(1.0, self._max_norm / max(norm, 1e-12)))
        self._steps += 1
        rate = np.float32(self.learning_rate / (1 - 0.9**self._steps))
        square_scale = np.float32(1 / (1 - 0.999**self._steps))
        for name, parameter in self._policy.parameters.items():
            mean, square, value = self._mean[name], self._square[name], gradient[name] * scale
            mean += np.float32(0.1) * (value - mean)
            square += np.float32(0.001) * (value**2 - square)
            parameter[...] += rate * mean / (np.sqrt(square * square_scale) + self._epsilon)
        return norm


def save_arrays(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Write arrays to `path` (.npz); readers, and a run after a kill, find the old file or the complete new one."""
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        temporary = Path(file.name)
        try:
            np.savez(file, allow_pickle=False, **arrays)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def one_blas_thread() -> AbstractContextManager[object]:
    """Limit matrix products to one thread within the context.

    These matrices are small: OpenBLAS's threads spin while they wait for each other, and on busy cores two threads were
    measured to be 12 times slower than one.
    """
    context: AbstractContextManager[object] = threadpool_limits(1, "blas")
    return context


def log_softmax(logits: Floats, temperature: Any = 1.0) -> Floats:
    """Return log-probs, float32 [B, vocabulary], of the distribution softmax(logits / temperature)."""
    # The largest logit is subtracted before the division, so that tiny temperatures cannot overflow into NaN.
    with np.errstate(over="ignore"):
        scaled = ((logits - logits.max(axis=1, keepdims=True)) / temperature).astype(logits.dtype)
    normed: Floats = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    return normed


def logprob_slopes(logprobs: Floats, targets: Ints, weights: Floats, temperature: float = 1.0) -> Floats:
    """Return the derivatives by the logits, float32 [B, vocabulary], of sum(weights * log-prob of targets).

    For any function of the targets' log-probs, pass the function's own derivatives as weights.
    """
    slopes = -np.exp(logprobs)
    slopes[np.arange(len(targets)), targets] += 1.0
    slopes *= (weights / temperature)[:, None]
    return slopes


def draw(logits: Floats, temperatures: NDArray[np.float64], uniforms: NDArray[np.float64]) -> tuple[Ints, Floats]:
    """Draw one token per row; return the tokens, int32 [B], and their log-probs, float32 [B]."""
    greedy = temperatures == 0
    logprobs = log_softmax(logits, np.where(greedy, 1.0, temperatures)[:, None])
    cumulated = np.cumsum(np.exp(logprobs, dtype=np.float64), axis=1)
    drawn = (cumulated <= (uniforms * cumulated[:, -1])[:, None]).sum(axis=1)
    tokens = np.where(greedy, logits.argmax(axis=1), np.minimum(drawn, logits.shape[1] - 1)).astype(np.int32)
    return tokens, logprobs[np.arange(len(tokens)), tokens]


def _problem(parameters: dict[str, Any], shape: PolicyShape | None) -> str:
    """Return what is wrong with the arrays of a file; empty if nothing is."""
    if set(parameters) != set(DIMENSIONS):
        return f"the arrays are {sorted(parameters)}, not {sorted(DIMENSIONS)}"
    sizes: dict[str, int] = {} if shape is None else {axis: getattr(shape, axis) for axis in PolicyShape.__slots__}
    for name, axes in DIMENSIONS.items():
        value = parameters[name]
        if value.dtype != np.float32:
            return f"{name} is {value.dtype}, not float32"
        expected = tuple(sizes.get(axis, "any") for axis in axes)
        if value.ndim != len(axes) or 0 in value.shape:
            return f"{name} has shape {value.shape}; its axes are {axes}"
        for axis, size in zip(axes, value.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                return f"{name} has shape {value.shape}, not {expected}"
        if not np.isfinite(value).all():
            return f"{name} holds numbers that are not finite"
    return ""
