"""What an adapter is: a class that plays one rollout, in the interpreter of an environment's own packages.

An adapter derives from nothing and imports nothing of this package, which its interpreter does not have. It has either
the methods of a `World`, which the service steps, or the one of a `Program`, which calls the model itself. Values are
plain dictionaries, as JSON can carry them; their types are here for readers and for type checkers. A whole adapter:

    import random

    class GuessTheNumber:
        def open(self, args, seed):
            self.number = random.Random(seed).randint(1, args.get("up_to", 10))
            return {"observations": {"main": "Guess my number."}}

        def step(self, player, text):
            if text.strip() == str(self.number):
                return {"rewards": {player: 1.0}, "done": True}
            return {"observations": {player: "No. Again."}}

        def close(self):
            return None

The worker makes one object per rollout, without arguments. Any method may be a coroutine.

- Plain methods run one after the other in the worker's main thread, and must not block for long. Each rollout keeps
  states of the global generators of `random` and numpy of its own, which begin with the seed: these are exchanged
  around each call, without the second normal number that numpy's older functions keep for the next call. With a class
  attribute `own_thread = True`, plain methods of different rollouts run at the same time in threads instead, and share
  the generators. A plain `run` always has a thread.
- The class is imported once, and workers are forks of that process, unless the import starts a thread or a process, or
  opens a file: what the import leaves in memory begins equally in each worker.
- Coroutines of different rollouts run at the same time on one event loop, and are cancelled with their rollout.
- `slots` is how many rollouts one worker process plays at a time (64), `limit_s` the seconds that one call of a method
  may take (60); `run` is limited by the job alone.

An exception ends the rollout as an infrastructure error, which is retried. An invalid action must not raise: answer it
with an observation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Required, TypedDict

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, Sequence

ONLY_PLAYER = "main"
"""The name of the player of an environment that has one."""


class Message(TypedDict):
    role: str
    """`system`, `user` or `assistant`."""
    content: str


class Opening(TypedDict, total=False):
    """What `open` returns."""

    observations: Required[Mapping[str, str | Sequence[Message]]]
    """What each player sees, for those that act now: a user message, or several messages. The players of a rollout
    are those of all observations; each has a conversation of its own. Several at once act at the same time."""
    tools: Sequence[Mapping[str, Any]]
    """Functions that players may call: `name`, `description`, `parameters` (a JSON schema), and `players`, the names of
    those who may; left out: all may."""


class Step(TypedDict, total=False):
    """What `step`, `call` and `close` return."""

    observations: Mapping[str, str | Sequence[Message]]
    """What each player sees that acts now, as in `Opening`. Of `call`: the result, for the player that called."""
    rewards: Mapping[str, float]
    """Rewards by player, of any size; each goes to the player's latest turn. A player's rewards are added up."""
    done: bool
    """The environment has ended."""
    truncated: bool
    """It stopped early, such as at its own limit of steps."""
    info: Mapping[str, Any]
    """Numbers become metrics, texts become notes; all else is left out."""
    mask: str
    """Why the rollout must not count, though the policy is not at fault: it is retried without a reward."""


class World(Protocol):
    """An adapter that the service steps."""

    def open(self, args: dict[str, Any], seed: int | None) -> Opening | Awaitable[Opening]:
        """Make the environment from the instance's `args`, and begin. Equal seeds begin equally."""

    def step(self, player: str, text: str) -> Step | Awaitable[Step]:
        """Take what a player said, without its reasoning."""

    def call(self, player: str, name: str, arguments: dict[str, Any]) -> Step | Awaitable[Step]:
        """Call a tool of `Opening.tools` for a player. Left out by environments without tools."""

    def close(self) -> Step | Awaitable[Step | None] | None:
        """Free the world's resources; return its last rewards and notes, if there are any.

        Called once after `open` has returned, also after a limit or an error; the result may then be ignored.
        """


class Outcome(TypedDict, total=False):
    """What `run` returns."""

    reward: Required[float]
    rewards: Mapping[str, float]
    """Rewards by conversation, as the calls named them; each makes a trajectory of its own (`Trajectory.split`)."""
    turn_rewards: Mapping[int, float] | Sequence[float]
    """Rewards by turn of the policy, from 0; they add up to the reward."""
    metrics: Mapping[str, float]
    error: str
    """What went wrong in the environment: the rollout is retried without a reward."""
    mask: str
    """As in `Step`."""


class Program(Protocol):
    """An adapter that calls the model itself, at an address of this rollout alone."""

    def run(
        self, url: str, key: str, models: Sequence[str], args: dict[str, Any], seed: int | None
    ) -> Outcome | Awaitable[Outcome]:
        """Play a rollout.

        Args:
            url: the address of an OpenAI-style API, with `/v1`; those of Anthropic and Google begin without it.
                Calls at `{url}/c/NAME`, or with the header `X-Prorl-Conversation: NAME`, are of the conversation NAME,
                others of `main`.
            key: the API key that calls must show.
            models: the names of models that it answers; the first is the policy.
            args: the instance's `args`.
            seed: the instance's `seed`.
        """
