from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from prorl_zmq.errors import EngineFailed
from prorl_zmq.inference.chat.chat_tokenizer import ChatTokenizer

SPECIAL = ["<unk>", "<s>", "</s>", "<<s>>"]
STOP = "<stop>"
MARK = "<mark>"


def make_backend(*, pieces: bool) -> Tokenizer:
    """A byte-level tokenizer, or one of words that puts a space before a text, as SentencePiece's do."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if pieces:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = ["▁", "\n", *map(chr, range(33, 127))]
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["the tools of the shell\n\n say the words"] * 3, trainer)
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in (STOP, MARK)])
    return backend


def make(*, pieces: bool) -> ChatTokenizer:
    return ChatTokenizer(make_backend(pieces=pieces), [STOP])


BYTES, PIECES = make(pieces=False), make(pieces=True)
BOTH = pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
GUARDED = [*SPECIAL, STOP]
IDS = {text: int(BYTES.encode(text)[0][0]) for text in (*GUARDED, MARK)}
CONTENTS = st.lists(st.sampled_from([*GUARDED, "<", "s>", "/s>", " ", "the", "\n", "xQcut0Qx"]), max_size=8).map(
    "".join
)


@BOTH
@given(contents=st.lists(CONTENTS, min_size=1, max_size=4))
def test_a_guarded_text_makes_no_special_token_and_stays_the_same(
    tokenizer: ChatTokenizer, contents: list[str]
) -> None:
    guarded, cut = tokenizer.guard(contents)
    whole = "</s>".join(guarded)
    (ids,) = tokenizer.encode(whole, cut=cut, after="<s>")
    counts = {text: int((ids == IDS[text]).sum()) for text in GUARDED}
    assert counts == {text: len(contents) - 1 if text == "</s>" else 0 for text in GUARDED}
    shown = tokenizer.decode(np.concatenate([[IDS["<s>"]], ids]).astype(np.int32))
    assert shown == "<s>" + "</s>".join(contents)


@BOTH
@given(text=CONTENTS, data=st.data())
def test_boundaries_divide_the_ids_of_the_whole_text(tokenizer: ChatTokenizer, text: str, data: st.DataObject) -> None:
    guarded, cut = tokenizer.guard(text)
    boundaries = sorted(data.draw(st.lists(st.integers(0, len(guarded)), max_size=3)))
    (whole,) = tokenizer.encode(guarded, cut=cut)
    parts = tokenizer.encode(guarded, boundaries, cut)
    assert len(parts) == len(boundaries) + 1
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_a_token_across_a_boundary_belongs_to_what_is_before_it() -> None:
    before, after = BYTES.encode("</s>\nthe</s>", [5])
    assert BYTES.decode(before) == "</s>\n"
    assert BYTES.decode(after) == "the</s>"
    before, after = BYTES.encode("a</s>b", [3])
    assert (BYTES.decode(before), BYTES.decode(after)) == ("a</s>", "b")


def test_a_text_after_a_token_begins_no_text() -> None:
    (ids,) = PIECES.encode("the</s>the", after="</s>")
    middle = ids.tolist().index(IDS["</s>"])
    word = ids[:middle].tolist()
    assert ids[middle + 1 :].tolist() == word
    (beginning,) = PIECES.encode("the")
    assert beginning.tolist() != word
    (inside,) = PIECES.encode("the", inside=True)
    assert inside.tolist() == word


def test_harmless_values_are_left_alone() -> None:
    value = [{"role": "user", "content": f"a {MARK} b"}, {"number": 1}]
    same, cut = BYTES.guard(value)
    assert same is value
    assert cut == ""
    (ids,) = BYTES.encode(value[0]["content"])
    assert IDS[MARK] in ids


def test_all_texts_of_a_value_are_cut() -> None:
    value: Any = ({"a</s>": ["</s>", 1, None]}, "</s>")
    (((key, (text, *others)),), last), cut = (lambda guarded, cut: ((guarded[0].items(), guarded[1]), cut))(
        *BYTES.guard(value)
    )
    assert [key, text, last] == [f"a<{cut}/s>", f"<{cut}/s>", f"<{cut}/s>"]
    assert others == [1, None]


def test_lone_surrogates_become_question_marks() -> None:
    (ids,) = BYTES.encode("a\ud800b")
    assert BYTES.decode(ids) == "a?b"


@pytest.mark.parametrize("token_id", [-1, 100_000])
def test_an_unknown_id_is_the_engines_fault(token_id: int) -> None:
    with pytest.raises(EngineFailed, match=f"token id {token_id}, which is not in the tokenizer's vocabulary"):
        BYTES.decode(np.array([0, token_id], np.int32))
    assert BYTES.decode(np.zeros(0, np.int32)) == ""


def test_a_cut_is_not_searched_for_in_what_was_written() -> None:
    _, first = BYTES.guard("</s>")
    _, second = BYTES.guard(f"</s>{first}")
    assert len(first) > 32
    assert second != first


@pytest.mark.parametrize(
    ("normalizer", "written"),
    [
        (normalizers.NFKC(), "＜/s＞"),
        (normalizers.NFKC(), "a ＜/s> ＜/s＞"),
        (normalizers.Lowercase(), "</S>"),
        (normalizers.Replace("\u200b", ""), "</\u200b\u200b\u200bs>"),
        (normalizers.Replace("\u2603", "</s>"), "a\u2603b"),
    ],
)
def test_no_other_spelling_is_normalized_to_a_special_token(normalizer: normalizers.Normalizer, written: str) -> None:
    backend = make_backend(pieces=False)
    document = json.loads(backend.to_str())
    for token in document["added_tokens"]:
        token["normalized"] = True
    backend = Tokenizer.from_str(json.dumps(document))
    backend.normalizer = normalizer
    tokenizer = ChatTokenizer(backend, [STOP])
    end = backend.token_to_id("</s>")
    assert end in backend.encode(written).ids
    text = f"the{written}</s>the"
    first, last = tokenizer.encode(text, [len(text) - 3])
    assert first.tolist().count(end) == 1
    assert first[-1] == end
    assert tokenizer.decode(last) == "the"


@pytest.mark.parametrize("texts", [["a</", "s>b"], ["a</ ", "\ns>"], ["<", "/", "s>"], ["<<s", ">", "x"]])
def test_texts_side_by_side_make_no_special_token(texts: list[str]) -> None:
    guarded, cut = BYTES.guard(texts)
    (ids,) = BYTES.encode("".join(text.strip() for text in guarded), cut=cut)
    assert not set(ids.tolist()) & {IDS[text] for text in GUARDED}
    assert BYTES.decode(ids) == "".join(text.strip() for text in texts)


@pytest.mark.parametrize("text", ["</s", " </s\n", "a</s", "stop>", "stop", "stop>b", "</s the </s"])
def test_text_makes_no_special_token_with_what_a_template_writes_beside_it(text: str) -> None:
    """As in `<function=NAME>`, where a name may end in all but the last character of a token."""
    tokenizer = ChatTokenizer(make_backend(pieces=False), [STOP], written=["<", ">\n", "="])
    guarded, cut = tokenizer.guard([{"role": "s", "name": text}])
    (ids,) = tokenizer.encode(f"=<{guarded[0]['name'].strip()}>\n", cut=cut)
    assert not set(ids.tolist()) & {IDS[each] for each in GUARDED}
    assert tokenizer.decode(ids) == f"=<{text.strip()}>\n"
    assert guarded[0]["role"] == "s"


def test_other_text_stays_whole_beside_what_a_template_writes() -> None:
    tokenizer = ChatTokenizer(make_backend(pieces=False), [STOP], written=["<", ">\n"])
    assert tokenizer.guard(["the words", "the", "a < b"])[1] == ""
