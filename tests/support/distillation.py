"""The settings of TRL's distillation that its worker reads."""

from __future__ import annotations

from types import SimpleNamespace


def distillation_arguments(batch_size: int, completion_tokens: int, top: int) -> SimpleNamespace:
    """Return the trainer's arguments, with plain sampling.

    Args:
        batch_size: samples of a step.
        completion_tokens: most tokens of a sample's completion.
        top: likeliest tokens of the teacher at each position.
    """
    return SimpleNamespace(
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=1,
        world_size=1,
        max_staleness=4,
        max_completion_length=completion_tokens,
        teacher_top_k=top,
        teacher_temperature=1.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
    )
