"""Teaches a tiny model to call bash, so that its conversations have several turns; run by a Python that has torch.

    python caller_model.py TINY_MODEL FOLDER [OTHER_FOLDER]

The other folder gets a model that differs a little, and does the same. After any prompt it writes a call of one of a
few commands, or now and then that it is done: some of both is likely at temperature 1, and so is a slip that makes a
call malformed.
"""

from __future__ import annotations

import sys

CALLS = ("ls", "pwd", "echo one", "seq 3", "cat notes.txt")
DONE = 0.25
"""Share of the turns that call nothing."""
STEPS = 120
BATCH = 12


def main(source: str, folder: str, *others: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    header = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    turns = [
        tokenizer.encode(
            f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{call}"}}}}\n</tool_call><|im_end|>',
            add_special_tokens=False,
        )
        for call in CALLS
    ]
    done = tokenizer.encode("Done.<|im_end|>", add_special_tokens=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        rows, labels = [], []
        for _ in range(BATCH):
            prompt = [*torch.randint(0, len(tokenizer), (int(torch.randint(4, 60, ())),)).tolist(), *header]
            said = done if torch.rand(()) < DONE else turns[int(torch.randint(len(turns), ()))]
            rows.append(torch.tensor(prompt + said))
            labels.append(torch.tensor([-100] * len(prompt) + said))
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        wanted = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        loss = model(input_ids=ids, labels=wanted).loss
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / STEPS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f}")
    for place in (folder, *others):
        model.eval().save_pretrained(place)
        tokenizer.save_pretrained(place)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * parameter.std() * torch.randn_like(parameter)


if __name__ == "__main__":
    main(*sys.argv[1:])
