"""The weights that an earlier training announced, of all its models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prorl_zmq.brokers.backends.backend_journal import BackendJournal
from prorl_zmq.brokers.backends.backend_records import WeightsRecord
from prorl_zmq.brokers.batches.batch_notes import weights_note
from prorl_zmq.brokers.journal.journal import Journal
from prorl_zmq.commands.earlier_training import Journals, announced_version, forget_weights

if TYPE_CHECKING:
    from pathlib import Path


def test_a_new_training_forgets_the_weights_of_all_models(tmp_path: Path) -> None:
    journals = Journals(tmp_path / "backends", (tmp_path / "rollouts",), tmp_path / "lock")
    assert announced_version(journals) == 0
    with BackendJournal(journals.backends) as backends:
        backends.write({}, [WeightsRecord(3), WeightsRecord(5, model="b")])
    assert announced_version(journals) == 5
    with Journal(journals.rollouts[0]) as rollouts:
        notes = dict([weights_note("policy", 3), weights_note("b", 7)])
        rollouts.write([], [], [], notes={**notes, "session:weights": b"kept"})
    assert announced_version(journals) == 7
    forget_weights(journals)
    assert announced_version(journals) == 0
    with BackendJournal(journals.backends) as backends, Journal(journals.rollouts[0]) as rollouts:
        assert backends.load_weights() == []
        assert rollouts.recover().notes.keys() == {"session:weights"}
