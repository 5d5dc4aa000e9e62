"""The chat format of any model whose tokenizer `transformers` loads, by its own chat template.

What opens a conversation is rendered and tokenised whole. After a turn of the policy only what is new is tokenised: the
tools' answers, in what the template writes around them (`chat_skeleton`). What the policy generated stays as it came.
Where the template would show the engine something else than it saw, the conversation is rendered whole again, unless
`ChatSettings.history` says otherwise.

Left out on purpose: images, documents, and messages of the user after the opening.
"""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from ..data.trajectory import Role
from ..errors import ConfigError
from .chat import ChatMessage
from .chat_skeleton import ChatSkeleton
from .chat_template import ChatTemplate, Message
from .chat_tokenizer import ChatTokenizer
from .chat_traits import TemplateTraits, find_traits
from .transformers_conversation import TransformersConversation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..wire.messages.backends import ChatSettings

_IMPORTING = Lock()
"""transformers cannot be imported by two threads at once; never held while a tokenizer is loaded."""
_ROLES = {Role.SYSTEM: "system", Role.USER: "user", Role.ASSISTANT: "assistant", Role.TOOL: "tool"}


class TransformersChatFormat:
    """Implements `chat.ChatFormat` by a chat template.

    Args:
        template: renders conversations.
        traits: what it does.
        tokenizer: tokenises what it renders.
        stop_token_ids: what ends a turn.
        rewrites: whether the engine is to see what the template makes of earlier turns.
    """

    def __init__(
        self,
        template: ChatTemplate,
        traits: TemplateTraits,
        tokenizer: ChatTokenizer,
        stop_token_ids: Sequence[int],
        *,
        rewrites: bool,
    ) -> None:
        self.template = template
        self.traits = traits
        self.tokenizer = tokenizer
        self.skeleton = ChatSkeleton(template, traits)
        self.rewrites = rewrites
        self._stop_token_ids = tuple(stop_token_ids)

    @classmethod
    def load(cls, settings: ChatSettings) -> TransformersChatFormat:
        """Load a tokenizer, and find out what its chat template does.

        Raises:
            ConfigError: there is no tokenizer or no chat template (`key` says which), or the template fails.
        """
        loaded = _load_tokenizer(settings.tokenizer)
        if not loaded.chat_template:
            raise ConfigError(
                f"the tokenizer in {settings.tokenizer} has no chat template: give the directory of a chat model, or "
                "add its chat_template.jinja",
                key="chat.template",
            )
        template = ChatTemplate(loaded.apply_chat_template, loaded.eos_token or "")
        backend = loaded.backend_tokenizer
        added = [(token.content, token.special) for token in backend.get_added_tokens_decoder().values()]
        traits = find_traits(template, added, settings.tool_calls)
        stop_token_ids = _end_tokens(Path(settings.tokenizer))
        if loaded.eos_token_id is not None:
            stop_token_ids.append(loaded.eos_token_id)
        if traits.end_of_turn:
            stop_token_ids.append(backend.token_to_id(traits.end_of_turn))
        if not stop_token_ids:
            raise ConfigError(
                f"nothing ends a turn: the tokenizer in {settings.tokenizer} has no eos_token, and its chat template "
                "writes no token after a turn",
                key="chat.tokenizer",
            )
        stop_texts = [text for i in stop_token_ids if (text := backend.id_to_token(i)) is not None]
        tokenizer = ChatTokenizer(backend, stop_texts)
        return cls(template, traits, tokenizer, sorted(set(stop_token_ids)), rewrites=settings.history == "template")

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Those of the tokenizer, of `generation_config.json`, and what the template writes at the end of a turn."""
        return self._stop_token_ids

    def conversation(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]
    ) -> TransformersConversation:
        """Begin a conversation; the tools are told by the template, or else in its system message."""
        told = list(messages)
        if tools and not self.traits.shows_tools:
            told = _with_system(told, self.traits.form.describe(tools))
        if not self.traits.takes_system:
            told = _without_system(told)
        names = frozenset(str(tool.get("function", tool).get("name", "")) for tool in tools)
        opening: list[Message] = [{"role": _ROLES[message.role], "content": message.content} for message in told]
        return TransformersConversation(
            self, opening, [message.role for message in told], tools if self.traits.shows_tools else (), names
        )

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        """Return the text of ids, special tokens included.

        Raises:
            EngineFailed: an id is not in the vocabulary.
        """
        return self.tokenizer.decode(token_ids)


def _with_system(messages: list[ChatMessage], text: str) -> list[ChatMessage]:
    """Add a text to the system message, or begin with one."""
    for index, message in enumerate(messages):
        if message.role == Role.SYSTEM:
            content = f"{message.content}\n\n{text}" if message.content else text
            return [*messages[:index], ChatMessage(Role.SYSTEM, content), *messages[index + 1 :]]
    return [ChatMessage(Role.SYSTEM, text), *messages]


def _without_system(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Put system messages at the beginning of the first message of the user."""
    system = [message.content for message in messages if message.role == Role.SYSTEM]
    others = [message for message in messages if message.role != Role.SYSTEM]
    if not system:
        return messages
    for index, message in enumerate(others):
        if message.role == Role.USER:
            others[index] = ChatMessage(Role.USER, "\n\n".join([*system, message.content]))
            return others
    return [ChatMessage(Role.USER, "\n\n".join(system)), *others]


def _load_tokenizer(name: str) -> Any:
    """Load a tokenizer from a directory, without a look at any network, or by its hub name."""
    directory = Path(name)
    if not directory.is_dir() and (directory.is_absolute() or name.startswith(".") or directory.exists()):
        raise ConfigError(
            f"{name} is no directory: the chat format needs the model's, with its tokenizer", key="chat.tokenizer"
        )
    with _IMPORTING, _quiet():
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            message = f"a chat format of kind transformers needs the package transformers ({error})"
            raise ConfigError(message, key="chat.kind") from error
    try:
        loaded = AutoTokenizer.from_pretrained(name, local_files_only=directory.is_dir())
    except Exception as error:
        raise ConfigError(
            f"no tokenizer could be loaded from {name} ({error}): give a directory with tokenizer.json and "
            "tokenizer_config.json, or a hub name",
            key="chat.tokenizer",
        ) from error
    if not getattr(loaded, "is_fast", False):
        raise ConfigError(
            f"the tokenizer in {name} has no fast form: convert it to a tokenizer.json", key="chat.tokenizer"
        )
    return loaded


def _end_tokens(directory: Path) -> list[int]:
    """Return the ids that `generation_config.json` ends a text with, if there is one."""
    path = directory / "generation_config.json"
    if not path.exists():
        return []
    try:
        if not path.is_file():  # opening a pipe would wait for its writer
            raise OSError("it is no file")
        ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        message = f"{path} cannot be read: {error}"
        raise ConfigError(message, key="chat.tokenizer") from error
    return [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back warnings: `transformers` has one for a machine without PyTorch, which a tokenizer does not need."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
