"""Every message of the service, one file per link: this package is the protocol.

A message is one MessagePack header frame, followed by the raw frames that its docstring names. At a ROUTER the header
follows an empty delimiter frame, for REQ and DEALER clients alike; PUSH/PULL messages have no delimiter. Each header is
a map whose `type` names the class (`phase_done` is `PhaseDone`); unknown fields are rejected. Times are in seconds and
sizes in bytes. No message carries a clock reading, since the clocks of two nodes differ (except `JobTrace` and
`JobRow`, which are for people).

    trainer                        ⇄ rollout broker   front_door, batches   ROUTER, the front door
    operator                       ⇄ rollout broker   watching              the same
    stage process                  → rollout broker   stages.StageEvent     PUSH → PULL
    rollout broker                 → stage process    stages.StageCommand   PUSH → PULL
    any process                    ⇄ backend broker   backends              ROUTER
    stage process, backend broker  ⇄ engine host      engines               ROUTER

Requests are idempotent: a request without a reply is resent with the same `request_id`. Jobs and results are in `jobs`,
how conversations become tokens in `chat`, shared limits, field types and bases in `base`.
"""
