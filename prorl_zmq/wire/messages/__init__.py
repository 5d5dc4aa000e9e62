"""Every message of the service: reading this file is reading the protocol.

A message is one MessagePack header frame, followed by raw frames where its docstring says so. Behind a ROUTER the
header comes after an empty delimiter frame, for REQ and DEALER clients alike; PUSH/PULL messages have no delimiter.
Each header is a map whose `type` names the class (`phase_done` is `PhaseDone`); unknown fields are refused. Times are
seconds, sizes are bytes, and no message carries a clock's reading, since two nodes have two clocks
(but `JobTrace.accepted_at`, for people).

    trainer        ⇄ rollout broker    Request / Reply              ROUTER, the front door
    stage process  → rollout broker    StageEvent                   PUSH → PULL
    rollout broker → stage process     StageCommand                 PUSH → PULL
    anyone         ⇄ backend broker    BackendRequest / BackendReply  ROUTER
    stage process  ⇄ engine host       EngineRequest / EngineReply  ROUTER
"""
