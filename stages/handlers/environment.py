"""The `environment` task: a rollout in an environment of another package, which has processes of its own.

Each player has a conversation under its name. The reward is that of the first player that is trained; a player's reward
is the sum of those that the environment gave it, and each is also one of the player's latest turn.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec

from ...data.rows import TRUNCATING
from ...data.trajectory import Role
from ...errors import EnvironmentFailed, InvalidJob
from ...inference.chat import ChatMessage
from ...tools.tool import AnyTool
from ...wire.messages.base import METRICS_LIMIT, NOTES_LIMIT
from ..environments.environment_pool import EnvironmentPool
from ..environments.environment_store import EnvironmentStore
from ..environments.environment_template import stamp_of
from ..handler import AgentHandler, EvalPhase, Evaluation, PhaseData, RunPhase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..conversation import Conversation
    from ..environments.environment_pool import EnvironmentRollout, Message, Step
    from ..environments.environment_template import EnvironmentPlace
    from ..episode import Turn

INFO_LIMIT = METRICS_LIMIT - 1
"""Most entries of a rollout's `info`, of which the first are kept."""
MORE = "more info"
"""The note that holds all texts of `info` beyond the limit of notes."""
ABSENT = "players of the instance"
"""The note on those that the environment did not have, such as for a wrong name."""
LOOK_S = 5.0
"""Seconds after which a rollout looks again where its environment is."""
ROLES = {"system": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}


class Player(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one player of an environment is played."""

    model: str = "policy"
    """The model that plays it, as in the job's `models`."""
    trained: bool | None = None
    """False: its turns are context. True: they are trained on, also with another model of the service, unless that is
    frozen. None: those of the job's own model are."""
    system: str = ""
    """The system message; empty: the instance's."""


class EnvironmentInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rollout in an environment."""

    environment: str
    """The name of an installed environment, or NAME==VERSION (see `prorl env list`)."""
    args: dict[str, Any] = {}
    """What its adapter takes, such as `{"id": …}`."""
    seed: int | None = None
    """Equal seeds begin equally: the jobs of a group share it. None: each begins differently."""
    system: str = ""
    """The system message of all players."""
    tools: list[str] | None = None
    """Which of the environment's tools are offered; None: all."""
    players: dict[str, Player] = {}
    """Players that another model plays, or that are not trained; all others are the policy's."""


class EnvironmentHandler(AgentHandler[EnvironmentInstance]):
    task = "environment"
    instance_type = EnvironmentInstance
    model_fields = ("players.*.model",)

    def __init__(self) -> None:
        self._pool: EnvironmentPool | None = None
        self._places: dict[str, tuple[EnvironmentPlace, float]] = {}
        """Where environments were, and when."""

    async def run(self, phase: RunPhase[EnvironmentInstance]) -> PhaseData:
        instance = phase.instance
        place = self._place(instance.environment)
        self._pool = self._pool or EnvironmentPool()
        async with self._pool.rollout(place, phase.job.job_id) as world:
            if not world.is_program:
                return await Game(phase, world).play()

            async def play(url: str, key: str, models: Sequence[str]) -> tuple[PhaseData, list[tuple[int, float]]]:
                outcome = await world.run(url, key, models, instance.args, instance.seed)
                data = {"reward": outcome.reward, "rewards": outcome.rewards, "metrics": outcome.metrics, "notes": {}}
                return data, outcome.turn_rewards

            return await phase.serve(play)

    def _place(self, name: str) -> EnvironmentPlace:
        place, looked_at = self._places.get(name, (None, 0.0))
        if place is None or time.monotonic() - looked_at > LOOK_S or stamp_of(place.python) != place.stamp:
            place = EnvironmentStore().place(name)
            self._places[name] = (place, time.monotonic())
        return place

    async def eval(self, phase: EvalPhase[EnvironmentInstance]) -> Evaluation:
        data = phase.data
        return Evaluation(data["reward"], data["metrics"], data["notes"], data["rewards"])

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()


class Game:
    """A rollout that the service steps, and its players."""

    def __init__(self, phase: RunPhase[EnvironmentInstance], world: EnvironmentRollout) -> None:
        self.done = False
        self._phase, self._world = phase, world
        self._talks: dict[str, Conversation] = {}
        self._rewards: defaultdict[str, float] = defaultdict(float)
        self._info: dict[str, float | str] = {}
        self._truncated = False
        self._offered: list[dict[str, Any]] = []
        self._unseen: dict[str, str | list[Message]] = {}
        """What players see, and have not answered."""

    async def play(self) -> PhaseData:
        instance = self._phase.instance
        opening = await self._world.open(instance.args, instance.seed)
        names = {tool["name"] for tool in opening.tools}
        if missing := set(instance.tools or ()) - names:
            words = f"the environment {instance.environment} has no tool {', '.join(sorted(missing))}"
            raise InvalidJob(f"{words}; it has {', '.join(sorted(names)) or 'none'}", field="tools")
        self._offered = [tool for tool in opening.tools if instance.tools is None or tool["name"] in instance.tools]
        self._unseen = dict(opening.observations)
        limited = False
        while self._unseen and not (self.done or limited):
            seen, self._unseen = self._unseen, {}
            turns = await self._turns(seen)
            limited = any(turn.stop is not None for turn in turns)
            for player, turn in zip(seen, turns, strict=True):
                if turn.stop in TRUNCATING and not self._talks[player].trained:
                    raise self._failed(
                        f"the player {player}, which is not trained, reached its limit ({turn.stop})", "limit"
                    )
            for player, turn in zip(seen, turns, strict=True):
                if not (self.done or limited):
                    self.note(await self._world.step(player, turn.text))
            if not (self._unseen or self.done or limited):
                raise self._failed("it has not ended, and no player sees anything to answer", "raised")
        self.note(await self._world.close())
        if not limited:
            if self._rewards and not self._rewards.keys() & self._talks.keys():
                whose, players = ", ".join(self._rewards), ", ".join(self._talks)
                raise self._failed(f"all its rewards are for {whose}, and its players are {players}", "raised")
            for talk in self._talks.values():
                talk.end()
        return self._result()

    def note(self, step: Step) -> None:
        """Take note of what the environment answered."""
        for player, reward in step.rewards.items():
            self._rewards[player] += reward
            talk = self._talks.get(player)
            if reward and talk is not None and talk.trained and talk.turns and talk.turns[-1].row is not None:
                talk.turns[-1].reward = (talk.turns[-1].reward or 0.0) + reward
        self._info |= {
            name: value
            for number, (name, value) in enumerate(step.info.items(), len(self._info))
            if number < INFO_LIMIT or name in self._info
        }
        self._truncated = self._truncated or step.truncated
        self.done = self.done or step.done
        self._unseen |= step.observations

    async def call(self, player: str, tool: str, arguments: dict[str, Any]) -> str:
        """Call a tool of the environment; return its result."""
        step = await self._world.call(player, tool, arguments)
        result = step.observations.pop(player, "")
        self.note(step)
        return result if isinstance(result, str) else "\n\n".join(message.content for message in result)

    async def _turns(self, seen: Mapping[str, str | list[Message]]) -> list[Turn]:
        """Take a turn of each player at once; if one fails, the others are cancelled."""
        if len(seen) == 1:
            return [await self._turn(*one) for one in seen.items()]
        tasks = [asyncio.ensure_future(self._turn(player, one)) for player, one in seen.items()]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            raise

    async def _turn(self, player: str, seen: str | list[Message]) -> Turn:
        messages = [ChatMessage(ROLES[one.role], one.content) for one in seen] if isinstance(seen, list) else seen
        if (talk := self._talks.get(player)) is not None:
            return await talk.say(messages)
        talk = self._talks[player] = self._begun(player, messages)
        return await talk.say()

    def _begun(self, name: str, seen: str | list[ChatMessage]) -> Conversation:
        player = self._phase.instance.players.get(name, Player())
        opening = [ChatMessage(Role.USER, seen)] if isinstance(seen, str) else [*seen]
        if system := player.system or self._phase.instance.system:
            if opening[0].role == Role.SYSTEM:
                system = f"{system}\n\n{opening.pop(0).content}"
            opening.insert(0, ChatMessage(Role.SYSTEM, system))
        tools = [EnvironmentTool(self, name, tool) for tool in self._offered if name in tool.get("players", (name,))]
        other = {"model": player.model} if player.model != "policy" else {}
        return self._phase.conversation(opening, tools, name=name, trained=player.trained, **other)

    def _result(self) -> PhaseData:
        trained = [name for name, talk in self._talks.items() if talk.trained]
        rewards = {name: self._rewards[name] for name in trained}
        metrics = {name: value for name, value in self._info.items() if not isinstance(value, str)}
        notes = {name: value for name, value in self._info.items() if isinstance(value, str)}
        if absent := [name for name in self._phase.instance.players if name not in self._talks]:
            notes = {ABSENT: f"{', '.join(absent)} never acted; those that did: {', '.join(self._talks)}", **notes}
        if len(notes) > NOTES_LIMIT:
            texts = [*notes.items()]
            more = "\n".join(f"{name}: {text}" for name, text in texts[NOTES_LIMIT - 1 :])
            notes = {**dict(texts[: NOTES_LIMIT - 1]), MORE: more}
        return {
            "reward": rewards[trained[0]] if trained else 0.0,
            "rewards": rewards if len(self._talks) > 1 else {},
            "metrics": metrics | ({"environment_truncated": 1.0} if self._truncated else {}),
            "notes": notes,
        }

    def _failed(self, how: str, reason: str) -> EnvironmentFailed:
        name = self._phase.instance.environment
        return EnvironmentFailed(f"the environment {name}: {how}", environment=name, reason=reason)


class EnvironmentTool(AnyTool):
    """A tool of an environment, for one player; the environment checks its arguments."""

    def __init__(self, game: Game, player: str, about: dict[str, Any]) -> None:
        self.name = about["name"]  # each environment has its own
        self._game, self._player = game, player
        self._about = {key: about[key] for key in ("name", "description", "parameters")}

    def schema(self) -> dict[str, Any]:
        return {"type": "function", "function": self._about}

    async def __call__(self, arguments: dict[str, Any], timeout_s: float) -> str:
        del timeout_s  # the adapter's own limit holds
        text = await self._game.call(self._player, self.name, arguments)
        self.ends_episode = self._game.done  # type: ignore[misc]  # as the call turned out
        return text
