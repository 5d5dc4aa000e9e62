"""TextArena: games for one player or several. `args`: `id`, `players` (1), and those of the game.

A player's name is its number. The reward of each is given at the end, also if a limit of the rollout ends the game.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import textarena

if TYPE_CHECKING:
    from ..adapter import Opening, Step


class TextArena:
    def open(self, args: dict[str, Any], seed: int | None) -> Opening:
        players = args.pop("players", 1)
        self._game = textarena.make(args.pop("id"), **args)
        self._game.reset(num_players=players, seed=seed)
        self._is_over = False
        return {"observations": self._next()}

    def step(self, player: str, text: str) -> Step:
        del player  # the game knows whose turn it is
        self._is_over, info = self._game.step(text)
        if not self._is_over:
            return {"observations": self._next(), "info": info}
        rewards, game = self._game.close()
        about = {f"{name} of player {player}": value for player, one in game.items() for name, value in one.items()}
        return {"rewards": {str(player): value for player, value in rewards.items()}, "done": True, "info": about}

    def close(self) -> None:
        if not self._is_over:
            self._game.close()

    def _next(self) -> dict[str, str]:
        player, text = self._game.get_observation()
        return {str(player): text}
