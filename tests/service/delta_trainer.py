"""A trainer that publishes deltas until it is killed: `delta_trainer.py FRONT_DOOR FOLDER`.

Version N is always the same weights, and no number is published twice. `trainer.log` has `begun N FINGERPRINT`, then
`written N`, then `served N` once an engine has it, or `failed N ERROR`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from support.weight_versions import KINDS, fingerprint, model, publish, step

from prorl_zmq import RolloutClient
from prorl_zmq.errors import ProrlError
from prorl_zmq.inference.weights.published_weights import PublishedWeights
from prorl_zmq.inference.weights.version_chain import Content


def main(front_door: str, folder: Path) -> None:
    log = folder / "trainer.log"

    def note(*words: object) -> None:
        with log.open("a") as lines:
            lines.write(" ".join(map(str, words)) + "\n")

    begun = [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("begun")]
    version, weights = 1, model()
    with (
        PublishedWeights(folder / "published", KINDS, threads=1) as published,
        RolloutClient(front_door, timeout_s=10, session="trainer") as client,
    ):
        while True:
            if version > max(begun, default=0):
                note("begun", version, fingerprint(weights))
                written = publish(published, weights, version)
                note("written", version)
                try:
                    client.update_weights(written.path, version, digest=written.weights)
                    note("served", version)
                    have = [Content(one.backend.weight_version) for one in client.backends.list()]
                    published.prune(version, have)
                except ProrlError as error:
                    note("failed", version, error.code, error.message)
            version, weights = version + 1, step(weights, version, 0.02)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
