"""Every message of the service, one file per link: reading this package is reading the protocol.

A message is one MessagePack header frame, followed by raw frames where its docstring says so. Behind a ROUTER the
header comes after an empty delimiter frame, for REQ and DEALER clients alike; PUSH/PULL messages have no delimiter.
Each header is a map whose `type` names the class (`phase_done` is `PhaseDone`); unknown fields are refused. Times are
seconds, sizes are bytes, and no message carries a clock's reading, since two nodes have two clocks
(but `JobTrace` and `JobRow`, for people).

    trainer                        ⇄ rollout broker   front_door, batches   ROUTER, the front door
    operator                       ⇄ rollout broker   watching              the same
    stage process                  → rollout broker   stages.StageEvent     PUSH → PULL
    rollout broker                 → stage process    stages.StageCommand   PUSH → PULL
    anyone                         ⇄ backend broker   backends              ROUTER
    stage process, backend broker  ⇄ engine host      engines               ROUTER

Requests are idempotent: one that gets no reply is sent again with the same `request_id`. Jobs and results are in
`jobs`, what all share (limits, field types, bases) in `base`.
"""
