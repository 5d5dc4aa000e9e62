"""What transformers says of trajectories: the largest difference of a log-prob. Run by the Python that has vLLM.

    python rescore.py TRAJECTORIES.npz MODEL_OF_VERSION_0 [MODEL_OF_VERSION_1 …]

The file has, per trajectory number k, `ids_k`, `mask_k`, `logprobs_k` and `versions_k`.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def main(path: str, *folders: str) -> None:
    torch.set_num_threads(1)
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]
    data = np.load(path)
    worst, tokens = 0.0, 0
    for name in data.files:
        if not name.startswith("ids_"):
            continue
        number = name.removeprefix("ids_")
        ids, mask = data[name], data[f"mask_{number}"]
        given, versions = data[f"logprobs_{number}"], data[f"versions_{number}"]
        for version in np.unique(versions[mask]):
            with torch.inference_mode():
                logits = models[version](torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
            ours = torch.log_softmax(logits, -1)[:-1].gather(1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])
            which = (mask & (versions == version))[1:]
            worst = max(worst, float(np.abs(ours[:, 0].numpy() - given[1:])[which].max()))
            tokens += int(which.sum())
    print(json.dumps({"worst": worst, "tokens": tokens}))


if __name__ == "__main__":
    main(*sys.argv[1:])
