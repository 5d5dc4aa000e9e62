"""A small transformer in PyTorch, trained on `shell` and `math` tasks with GRPO and DAPO sampling through the service.

`python -m prorl_zmq.examples.train_torch` starts the service, an engine of its own, and trains; `training` is where to
begin reading. Nothing is downloaded: `tokenizer` makes a tokenizer and chat template, `model` is the policy, `script`
warms it up by imitation, `engine` serves it, `learner` learns.
"""
