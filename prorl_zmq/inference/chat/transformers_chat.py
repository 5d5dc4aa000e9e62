"""The chat format of any model whose tokenizer `transformers` loads, by its own chat template.

The opening of a conversation is rendered and tokenised whole. After a turn of the policy only new text is tokenised:
the tools' answers, with the template's text around them (`skeleton`). Generated ids stay unchanged. If the template
would change what the engine saw, the conversation is rendered whole again, unless `ChatSettings.history` is `append`.

Not supported: images and documents.
"""

from __future__ import annotations

import json
import logging
import re
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateSyntaxError

from ...data.trajectory import Role
from ...errors import ConfigError, InvalidJob
from ...system.installation import how_to_install
from ..tool_calls.call import ToolCall
from . import ChatMessage, Piece, ReadTurn
from .chat_tokenizer import ChatTokenizer
from .forms import forms, systems_as_user
from .history import UNKNOWN_TOOL, History, history
from .probes import AddedTokens, find_traits, inside_turns
from .skeleton import TurnShape
from .template import ChatTemplate, TemplateRefused, template_variables, written_texts
from .traits import TemplateTraits, WrittenCall
from .transformers_conversation import TemplateParts, TransformersConversation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ...wire.messages.chat import ChatSettings

_IMPORTING = Lock()
"""transformers cannot be imported by two threads at once; never held while a tokenizer is loaded."""


class TransformersChatFormat(TemplateParts):
    """Implements `chat.ChatFormat` by a chat template."""

    def __init__(
        self,
        template: ChatTemplate,
        traits: TemplateTraits,
        tokenizer: ChatTokenizer,
        stop_token_ids: Sequence[int],
        settings: ChatSettings,
        variables: frozenset[str],
    ) -> None:
        super().__init__(template, traits, tokenizer, tuple(stop_token_ids), rewrites=settings.history == "template")
        self.warning = "" if settings.tool_calls else traits.warning
        self.variables = variables
        """The arguments that the template reads."""

    @classmethod
    def load(cls, settings: ChatSettings) -> TransformersChatFormat:
        """Load a tokenizer, and find its chat template's traits.

        Raises:
            ConfigError: tokenizer or chat template is missing (`key` names which), or the template fails.
        """
        loaded = _load_tokenizer(settings.tokenizer)
        if not loaded.chat_template:
            raise ConfigError(
                f"the tokenizer in {settings.tokenizer} has no chat template: give the directory of a chat model, or "
                "add its chat_template.jinja",
                key="chat.template",
            )
        variables = _variables(loaded)
        arguments = _checked_arguments(settings, variables)
        template = ChatTemplate(loaded.apply_chat_template, loaded.eos_token or "", arguments)
        backend = loaded.backend_tokenizer
        added = [(token.content, token.special) for token in backend.get_added_tokens_decoder().values()]
        named = _end_tokens(Path(settings.tokenizer))
        if loaded.eos_token_id is not None:
            named.append(loaded.eos_token_id)
        tokens = AddedTokens(added, [text for i in named if (text := backend.id_to_token(i)) is not None])
        traits = find_traits(template, tokens, settings.tool_calls, foreign=bool(settings.parser_url))
        frame, inside = inside_turns(template, tokens, traits)
        ends = {*named, *(backend.token_to_id(end) for end in traits.ends.texts)}
        # A token that the template also writes within a turn does not end one, if any other does.
        stop_token_ids = ends - {backend.token_to_id(token) for token in inside} or ends
        if not stop_token_ids:
            raise ConfigError(
                f"nothing ends a turn: the tokenizer in {settings.tokenizer} has no eos_token, and its chat template "
                "writes no token after a turn",
                key="chat.tokenizer",
            )
        frame |= {text for i in ends if (text := backend.id_to_token(i)) is not None}
        calls = tokens.all_in(traits.form.write("name", {"key": "value"}))
        tokenizer = ChatTokenizer(backend, frame | calls, inside | calls, _written(loaded))
        return cls(template, traits, tokenizer, sorted(stop_token_ids), settings, variables)

    def conversation(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]
    ) -> TransformersConversation:
        """Begin a conversation; the template describes the tools, or else its system message does."""
        return self._conversation(history(self._with_tools(messages, tools), self.traits), tools)

    def opening(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> tuple[Piece, ...]:
        refused: InvalidJob | None = None
        for form in forms(self._with_tools(messages, tools), self.traits.form.write):
            try:
                return self._conversation(history(form, self.traits), tools).prompt().pieces
            except InvalidJob as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def read_turn(self, generated: NDArray[np.int32], tools: Sequence[dict[str, Any]] = ()) -> ReadTurn:
        whole, ended_by = self.decode_turn(generated)
        reasoning, text = self.traits.split(whole)
        calls = tuple(self.traits.calls(text, ended_by, tools))
        return ReadTurn(reasoning, text, self.traits.before_calls(text), calls, bool(ended_by), ended_by)

    def following(
        self, turn: ReadTurn, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]
    ) -> tuple[Piece, ...]:
        calls = [
            WrittenCall(call.name, {}, self.traits.call_id(number, call.name, call.call_id))
            if isinstance(call, ToolCall)
            else WrittenCall(call.name or UNKNOWN_TOOL, {}, self.traits.call_id(number, call.name or UNKNOWN_TOOL))
            for number, call in enumerate(turn.calls, 1)
        ]
        answered = {str(number): call for number, call in enumerate(calls)}
        shown = tools if self.traits.shows_tools else ()
        # With its calls or, where the template rejects these (more than one, say), as text alone.
        shape = TurnShape(turn.reasoning is not None, tuple(call.name for call in calls), self.traits.writes_calls)
        shapes = dict.fromkeys((shape, shape._replace(written=False)))
        for form, as_shape in product(forms(messages, self.traits.form.write), shapes):
            with suppress(TemplateRefused):
                return self.pieces_after(
                    ["system", "user"] if self.traits.takes_system else ["user"],
                    as_shape,
                    [call.call_id for call in calls],
                    history(form, self.traits, answered),
                    shown,
                    ended_by=turn.ended_by,
                    calls_before=_calls_before(turn),
                )
        message = "the model's chat template refuses the messages that follow a turn"
        raise InvalidJob(message, field="messages")

    def _with_tools(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> list[ChatMessage]:
        told = list(messages)
        if tools and not self.traits.shows_tools:
            told = _with_system(told, self.traits.form.describe(tools))
        return told if self.traits.takes_system else _without_system(told)

    def _conversation(self, told: History, tools: Sequence[dict[str, Any]]) -> TransformersConversation:
        shown = tools if self.traits.shows_tools else ()
        return TransformersConversation(self, told.messages, told.roles, shown, tools)


def _calls_before(turn: ReadTurn) -> int:
    """Return the number of calls before a turn, if its first call is numbered so."""
    own = next((call.call_id for call in turn.calls if isinstance(call, ToolCall)), "")
    return int(own) if re.fullmatch("[0-9]{1,3}", own) else 0


def _with_system(messages: list[ChatMessage], text: str) -> list[ChatMessage]:
    """Append a text to the leading system message, or add one."""
    if messages and messages[0].role == Role.SYSTEM:
        content = messages[0].content
        return [ChatMessage(Role.SYSTEM, f"{content}\n\n{text}" if content else text), *messages[1:]]
    return [ChatMessage(Role.SYSTEM, text), *messages]


def _without_system(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Move the leading system messages into the first message of the user; later ones become the user's."""
    told = systems_as_user(messages)
    system = [message.content for message in told if message.role == Role.SYSTEM]
    others = [message for message in told if message.role != Role.SYSTEM]
    if not system:
        return told
    for index, message in enumerate(others):
        if message.role == Role.USER:
            others[index] = ChatMessage(Role.USER, "\n\n".join([*system, message.content]))
            return others
    return [ChatMessage(Role.USER, "\n\n".join(system)), *others]


def _load_tokenizer(name: str) -> Any:
    """Load a tokenizer from a directory, without network access, or by its hub name."""
    directory = Path(name)
    if not directory.is_dir() and (directory.is_absolute() or name.startswith(".") or directory.exists()):
        raise ConfigError(
            f"{name} is not a directory: the chat format needs the model's, with its tokenizer", key="chat.tokenizer"
        )
    with _IMPORTING, _quiet():
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            message = f"the chat format of {name} needs transformers ({error}): {how_to_install('models')}"
            raise ConfigError(message, key="chat.kind") from error
    try:
        loaded = AutoTokenizer.from_pretrained(name, local_files_only=directory.is_dir(), trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a damaged tokenizer
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"the tokenizer of {name} is Python code in the model's own files, which prorl does not run: set "
                "tokenizer to a directory with a tokenizer.json that gives the same ids, and the chat template",
                key="chat.tokenizer",
            ) from error
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


def _variables(loaded: Any) -> frozenset[str]:
    sources = loaded.chat_template
    try:
        found = [
            template_variables(source, loaded.special_tokens_map)
            for source in (sources.values() if isinstance(sources, dict) else [sources])
        ]
    except TemplateSyntaxError as error:
        words = f"the chat template of {loaded.name_or_path} is no Jinja template, line {error.lineno}: {error}"
        raise ConfigError(words, key="chat.template") from error
    return frozenset().union(*found)


def _written(loaded: Any) -> frozenset[str]:
    sources = loaded.chat_template
    return frozenset().union(*map(written_texts, sources.values() if isinstance(sources, dict) else [sources]))


def _checked_arguments(settings: ChatSettings, variables: frozenset[str]) -> dict[str, Any]:
    key = "chat.template_arguments"
    try:
        arguments = settings.arguments()
    except ValueError as error:
        raise ConfigError(f"template_arguments is no JSON object: {error}", key=key) from error
    if unknown := sorted(arguments.keys() - variables):
        has = f"it looks at {', '.join(sorted(variables))}" if variables else "it looks at none"
        raise ConfigError(
            f"the chat template of {settings.tokenizer} does not look at the argument {unknown[0]}: {has}", key=key
        )
    return arguments


def _end_tokens(directory: Path) -> list[int]:
    """Return the ids that end a text by `generation_config.json`, if there is one."""
    path = directory / "generation_config.json"
    if not path.exists():
        return []
    try:
        if not path.is_file():  # opening a pipe would wait for its writer
            raise OSError("it is not a file")
        ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        message = f"{path} cannot be read: {error}"
        raise ConfigError(message, key="chat.tokenizer") from error
    return [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings: `transformers` warns on a machine without PyTorch, which a tokenizer does not need."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
