"""What is said of a model's folder before vLLM is imported."""

from __future__ import annotations

import importlib.util
import re
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import pytest

from prorl_zmq.errors import ConfigError
from prorl_zmq.inference.vllm.vllm_draft import EXTENSION, extend_workers
from prorl_zmq.inference.vllm.vllm_start import model_folder, start_async_llm
from prorl_zmq.system.installation import how_to_install

if TYPE_CHECKING:
    from pathlib import Path


def test_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "tokenizer.json").touch()
    assert model_folder(str(tmp_path)) == tmp_path


def test_name_on_a_hub() -> None:
    assert model_folder("some-owner/Some.Model-1B") is None


@pytest.mark.parametrize("model", ["/no/such/folder", "./nowhere", "../some/where", "a/b/c", ""])
def test_missing_folder(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        model_folder(model)
    assert caught.value.key == "model"


@pytest.mark.parametrize(("files", "lacking"), [([], "config.json"), (["config.json", "x.safetensors"], "tokenizer")])
def test_folder_without(files: list[str], lacking: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=lacking) as caught:
        model_folder(str(tmp_path))
    assert caught.value.key == "model"


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None,
    reason="only a machine without vLLM shows it",
)
def test_vllm_is_not_installed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(how_to_install("vllm"))):
        start_async_llm(str(tmp_path), [])


@pytest.mark.parametrize(
    ("speculative", "own", "expected"),
    [
        (None, "", ""),
        ({"method": "ngram", "num_speculative_tokens": 2}, "", ""),
        ({"model": "small"}, "", EXTENSION),
        ({"model": "small"}, "mine.Extension", "mine.Extension"),
    ],
)
def test_only_a_draft_model_extends_the_workers(speculative: Any, own: str, expected: str) -> None:
    options = Namespace(speculative_config=speculative, worker_extension_cls=own)
    extend_workers(options)
    assert options.worker_extension_cls == expected
