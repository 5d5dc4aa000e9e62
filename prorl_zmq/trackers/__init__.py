"""`--log`: a run's figures and sample conversations, in Weights & Biases, TensorBoard, Trackio or MLflow."""

from .conversation import Conversation, sample_conversations
from .tracker import Tracker, open_tracker
from .values import batch_values, rollout_values

__all__ = [
    "Conversation",
    "Tracker",
    "batch_values",
    "open_tracker",
    "rollout_values",
    "sample_conversations",
]
