"""What a trajectory says, turn by turn and token by token, whatever the tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from chat_families import FAMILIES, make_tokenizer, save_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.evaluation.transcript import Call, TextReader, Transcript, make_transcript
from prorl_zmq.inference.chat.embedded_chat import EmbeddedChatFormat
from prorl_zmq.inference.chat.loading import load_chat_format
from prorl_zmq.inference.tokenizer import encode
from prorl_zmq.wire.messages.chat import ChatSettings

from .conftest import HOSTILE, made_plan, made_sample, made_trajectory

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("transformers")

READER = TextReader(EmbeddedChatFormat(), ChatSettings(), "tiny")


def test_turns_calls_tokens_masks_and_log_probs_are_written_down() -> None:
    trajectory = made_trajectory(made_sample(made_plan(), 0).result, "It is four", tool_says="files")
    transcript = make_transcript("job", trajectory, READER)
    assert [turn.role for turn in transcript.turns] == ["system", "user", "assistant", "tool", "assistant"]
    assert transcript.turns[2].calls == (Call("bash", '{"command": "ls"}'),)
    assert transcript.turns[4].text == "It is four<|im_end|>"  # without what the template opens the turn with
    assert transcript.turns[3].text is not None
    assert "files" in transcript.turns[3].text
    assert transcript.tokens is not None
    assert "".join(transcript.tokens) == READER.text(trajectory.token_ids)
    assert transcript.mask == tuple(trajectory.loss_mask.astype(int))
    pairs = zip(transcript.logprobs, trajectory.logprobs, strict=True)
    assert all(ours is None or ours == pytest.approx(theirs, abs=1e-4) for ours, theirs in pairs)
    assert [logprob is None for logprob in transcript.logprobs] == [not one for one in transcript.mask]
    assert set(transcript.versions) == {-1, 3}
    assert msgspec.json.decode(msgspec.json.encode(transcript), type=Transcript) == transcript


def test_without_a_tokenizer_there_are_ids() -> None:
    trajectory = made_trajectory(made_sample(made_plan(), 0).result)
    transcript = make_transcript("job", trajectory, None)
    assert transcript.tokens is None
    assert transcript.turns[0].text is None
    assert transcript.token_ids == tuple(trajectory.token_ids.tolist())


def test_ids_of_another_vocabulary_are_kept_as_ids() -> None:
    trajectory = made_trajectory(made_sample(made_plan(), 0).result)
    trajectory.token_ids.setflags(write=True)
    trajectory.token_ids[3] = 100_000
    assert make_transcript("job", trajectory, READER).tokens is None


@given(st.text(max_size=40))
def test_the_texts_of_tokens_are_the_text(text: str) -> None:
    ids = encode(text)
    texts = READER.texts(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == READER.text(ids)


def test_a_character_in_parts_is_with_the_token_that_completes_it() -> None:
    texts = READER.texts(encode("a€b"))
    assert [text for text in texts if text] == ["a", "€", "b"]
    assert texts[1:3] == ("", "")
    assert [text for text in READER.texts(encode("a😀😁é")) if text] == ["a", "😀", "😁", "é"]
    many = "😀" * 100
    assert "".join(READER.texts(encode(many))) == many


def test_what_is_meant_as_a_call_and_is_none_is_said_and_reasoning_has_no_calls() -> None:
    (call,) = READER.calls("<tool_call>{not json</tool_call>")
    assert call.name == ""
    assert "could not be read" in call.arguments
    assert READER.calls('<think><tool_call>{"name": "bash"}</tool_call></think>Done.') == ()


def test_hostile_text_is_kept_as_it_was_said() -> None:
    trajectory = made_trajectory(made_sample(made_plan(), 0).result, HOSTILE)
    transcript = make_transcript("job", trajectory, READER)
    assert transcript.turns[-1].text == f"{HOSTILE}<|im_end|>"
    assert msgspec.json.decode(msgspec.json.encode(transcript), type=Transcript) == transcript


class SentencePieces:
    """Decodes as sentencepiece does: the blank that begins a text is taken away."""

    stop_token_ids = ()
    PIECES = ("\u2581Hello", "\u2581world", "s", "!")

    def conversation(self, messages: object, tools: object) -> object:
        raise NotImplementedError

    def decode(self, token_ids: np.ndarray) -> str:  # type: ignore[type-arg]
        return "".join(self.PIECES[index] for index in token_ids).replace("\u2581", " ").removeprefix(" ")


def test_blanks_that_begin_a_token_are_kept() -> None:
    reader = TextReader(SentencePieces(), ChatSettings(tool_calls="hermes"))  # type: ignore[arg-type]
    assert reader.texts(np.array([0, 1, 2, 3], np.int32)) == (" Hello", " world", "s", "!")


@pytest.mark.filterwarnings("ignore")
def test_a_models_own_tokenizer_is_read(tmp_path: Path) -> None:
    settings = ChatSettings("transformers", str(save_tokenizer(FAMILIES["chatml"], tmp_path)))
    reader = TextReader(load_chat_format(settings), settings)
    tokenizer = make_tokenizer(FAMILIES["chatml"])
    text = 'na\u00efve \u20ac\U0001f600 <tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    ids = np.array(tokenizer.encode(text), np.int32)
    assert "".join(reader.texts(ids)) == reader.text(ids) == text
    assert reader.calls(text) == (Call("bash", '{"command": "ls"}'),)
