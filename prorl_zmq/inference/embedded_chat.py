r"""The embedded policy's chat format: ChatML with hermes tool calls, in few tokens, since its context window is small.

<|im_start|>user\nCount the lines …<|im_end|>\n<|im_start|>assistant\n
<tool_call>{"name": "bash", "arguments": {"command": "wc -l < data.txt"}}</tool_call><|im_end|>\n
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..trajectory import Role
from .tokenizer import IM_END, IM_START, ROLE_PIECES, decode, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .chat import ChatMessage

_ROLES: dict[Role, NDArray[np.int32]] = {
    role: encode(piece)
    for role, piece in zip((Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL), ROLE_PIECES, strict=True)
}
_NEWLINE = encode("\n")


class EmbeddedChatFormat:
    """Implements `chat.ChatFormat` for the embedded policy."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """`<|im_end|>` ends a turn of the policy."""
        return (IM_END,)

    def encode_message(self, message: ChatMessage) -> NDArray[np.int32]:
        """Give the ids of one whole message, int32 [M]; its content can make no special token."""
        return np.concatenate([_ids(IM_START), _ROLES[message.role], encode(message.content), _ids(IM_END), _NEWLINE])

    def generation_prompt(self) -> NDArray[np.int32]:
        """Give the ids of `<|im_start|>assistant` and a line's end, int32 [2]."""
        return np.concatenate([_ids(IM_START), _ROLES[Role.ASSISTANT]])

    def end_of_turn(self, generated: NDArray[np.int32]) -> NDArray[np.int32]:
        """Give the line's end after `<|im_end|>`, and that token too if the policy was cut off before it."""
        if len(generated) and generated[-1] == IM_END:
            return _NEWLINE.copy()
        return np.concatenate([_ids(IM_END), _NEWLINE])

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        """Give the text of ids, special tokens included; an `<|im_end|>` that ends them is left out."""
        return decode(token_ids[:-1] if len(token_ids) and token_ids[-1] == IM_END else token_ids)

    def describe_tools(self, tools: Sequence[dict[str, Any]]) -> str:
        """Give the tools' names only: this policy knows how to call them, and reads no schema."""
        names = [str(tool.get("function", tool).get("name", "?")) for tool in tools]
        return f"Tools: {', '.join(names)}."


def _ids(*token_ids: int) -> NDArray[np.int32]:
    return np.array(token_ids, np.int32)
