"""What verl, SkyRL, slime and NeMo RL take, made of a batch's groups: one module for each, in its own names.

An adapter only renames and re-aligns. A framework is imported by what needs its classes, when it is called, and all the
rest is numpy and plain Python; advantages, losses and padding rules stay the framework's.
"""
