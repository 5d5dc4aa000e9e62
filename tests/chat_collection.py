"""The chat templates of current models in the folder next to the repository, each with a tokenizer that has its tokens.

They are other people's files and no part of this repository; where they are missing, tests of them are skipped. One
small vocabulary is trained for all; each template's own tokens are added to it, as `SOURCES.md` there lists them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "chat_templates"


@dataclass(frozen=True)
class Model:
    """One template and the tokens of its tokenizer."""

    name: str
    special: tuple[str, ...]
    plain: tuple[str, ...]
    """Added, and not special."""
    bos: str | None
    eos: str
    stops: tuple[str, ...]
    """What ends a turn, beside `eos`."""

    @property
    def template(self) -> str:
        return (FOLDER / f"{self.name}.jinja").read_text()


def _models() -> dict[str, Model]:
    sources = FOLDER / "SOURCES.md"
    if not sources.exists():
        return {}
    found = {}
    for line in sources.read_text().partition("## Tokens for")[2].splitlines():
        cells = [
            tuple(token.replace("\\|", "|") for token in re.findall(r"`([^`]+)`", cell))
            for cell in re.split(r"(?<!\\)\|", line)[1:-1]
        ]
        if len(cells) == 7 and cells[0]:
            (name,), special, plain, bos, (eos,), stops, _ = cells
            found[name] = Model(name, special, plain, bos[0] if bos else None, eos, stops)
    return found


MODELS = _models()


@lru_cache(1)
def _vocabulary() -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["the tools of a shell say what is in the data\n\n" * 4], trainer)
    return backend.to_str()


def make_tokenizer(model: Model) -> PreTrainedTokenizerFast:
    """Give a tokenizer with a model's tokens and its template."""
    from transformers import PreTrainedTokenizerFast  # here, since workers that run no such test import it in vain

    backend = Tokenizer.from_str(_vocabulary())
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in model.special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in model.plain])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=model.bos, eos_token=model.eos, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = model.template
    return tokenizer


def save_model(model: Model, directory: Path) -> Path:
    """Write what a model's directory has beside its weights."""
    tokenizer = make_tokenizer(model)
    tokenizer.save_pretrained(directory)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in (model.eos, *model.stops)]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return directory
