"""Environments on the real server of openenv-core: python openenv_worlds.py NAME PORT SESSIONS, in `.openenv`.

They are those that `openenv_server.py` imitates.
"""

import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: str


class Move(Action):
    """Move to a place."""

    x: int
    y: int


class Text(Observation):
    text: str
    tries: int = 0


class GuessWorld(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, up_to=9, **_):
        self.number, self.tries = (seed or 0) % up_to, 0
        return Text(text=f"Guess a number below {up_to}.")

    def step(self, action, timeout_s=None, **_):
        if action.guess == "crash":
            raise ValueError("the world broke")
        self.tries += 1
        right = action.guess == str(self.number)
        return Text(text="Yes." if right else "No.", tries=self.tries, reward=1.0 if right else -0.5, done=right)

    @property
    def state(self):
        return State()


class MoveWorld(GuessWorld):
    def step(self, action, timeout_s=None, **_):
        return Text(text=f"You are at {action.x}, {action.y}.", reward=True, done=True)


class SumsWorld(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        tools = FastMCP("sums")

        @tools.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(tools)

    def reset(self, seed=None, episode_id=None, **_):
        return Observation()

    def _step_impl(self, action, timeout_s=None, **_):
        raise NotImplementedError

    @property
    def state(self):
        return State()


WORLDS = {
    "guess": (GuessWorld, Guess, Text),
    "move": (MoveWorld, Move, Text),
    "sums": (SumsWorld, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    name, port, sessions = sys.argv[1:]
    app = create_fastapi_app(*WORLDS[name], max_concurrent_envs=int(sessions))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
