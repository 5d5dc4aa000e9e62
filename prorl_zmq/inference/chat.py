"""How conversations become tokens: the interface between the agent loop and a model's chat template.

Only new messages are ever tokenised. The agent loop asks for the ids of the opening messages, appends what the engine
generated as it came, and asks for the ids of each further message alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..trajectory import Role


CHAT_FORMATS = ("embedded",)
"""The names that `load_chat_format` knows."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: Role
    content: str


class ChatFormat(Protocol):
    """Tokenizer and chat template of one model family."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids that end a turn of the policy."""

    def encode_message(self, message: ChatMessage) -> NDArray[np.int32]:
        """Give the ids of one whole message, int32 [M], with all that the template puts around it."""

    def generation_prompt(self) -> NDArray[np.int32]:
        """Give the ids that open a turn of the policy, int32 [M]."""

    def end_of_turn(self, generated: NDArray[np.int32]) -> NDArray[np.int32]:
        """Give the ids, int32 [M], that the template has between the policy's turn and the next message."""

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        """Give the text of ids, special tokens included; a stop token that ends them is left out."""

    def describe_tools(self, tools: Sequence[dict[str, Any]]) -> str:
        """Give the text that tells the model of its tools (JSON schemas), for the system message."""


def check_chat_format(name: str) -> str:
    """Give `name` back if a chat format has it, without loading one.

    Raises:
        ConfigError: none has.
    """
    if name not in CHAT_FORMATS:
        raise ConfigError(f"no chat format is called {name!r}; there is: {', '.join(CHAT_FORMATS)}", key="chat_format")
    return name


def load_chat_format(name: str) -> ChatFormat:
    """Give the chat format of that name.

    Raises:
        ConfigError: there is none.
    """
    check_chat_format(name)
    from .embedded_chat import EmbeddedChatFormat

    return EmbeddedChatFormat()
