from __future__ import annotations
import itertools, os, time, tempfile, threading
from pathlib import Path
import msgspec, pytest, zmq
from prorl_zmq import codec
from prorl_zmq.config import RolloutBrokerSettings
from prorl_zmq.messages import *
from prorl_zmq.errors import *
from .conftest import TestService, scripted, until, SETTINGS

def endless(**i):
    for n in itertools.count():
        yield msgspec.structs.replace(scripted(**i), job_id=f"prompt-{n}")

def raw(service, msg, frames=(), wait=5000):
    ctx = zmq.Context.instance()
    s = ctx.socket(zmq.REQ); s.linger = 0
    s.connect(service.front_door)
    s.send_multipart([codec.encode(msg) if not isinstance(msg, (bytes,)) else msg, *frames])
    try:
        if not s.poll(wait): return None
        return codec.decode(s.recv_multipart()[0], FrontDoorReply)
    finally: s.close()

def svc(**k):
    d = tempfile.TemporaryDirectory(prefix="prorl-t-")
    s = TestService(Path(d.name), msgspec.structs.replace(SETTINGS, **k))
    s.d = d
    s.start_backend_broker(); s.start_rollout_broker(); s.start_stages()
    return s

def test_keepalive_shorten():
    s = svc()
    try:
        with s.client() as c:
            a = c.open_batch(1, 2)              # lease 60: thread sleeps 15 s
            time.sleep(0.3)
            b = c.open_batch(1, 2, lease_s=2.0)
            time.sleep(4.5)
            st = c.status().batches
            print("KEEPALIVE batches left", len(st))
            try: a.next_group(0.1)
            except Exception as e: print("KEEPALIVE", repr(e)[:150])
    finally: s.close()

def test_group_over_quota():
    s = svc(max_jobs=10, max_session_share=1.0)
    try:
        with s.client() as c:
            b = c.open_batch(1, 16, keep="all"); b.feed(endless())
            try: print("OVERQ", b.next_group(6.0))
            except Exception as e: print("OVERQ", repr(e)[:200])
            b.close()
    finally: s.close()

def test_two_batches_deadlock():
    s = svc(max_jobs=10, max_session_share=1.0)
    try:
        with s.client() as c:
            b1 = c.open_batch(1, 8, keep="all"); b2 = c.open_batch(1, 8, keep="all")
            b1.feed(endless(), last=True); b2.feed(endless())
            out=[]
            t=threading.Thread(target=lambda: None)
            for b in (b1,b2):
                try: out.append(b.next_group(0.3))
                except Exception as e: out.append(str(e)[:80])
            for b in (b1,b2):
                try: print("TWO", b.next_group(5.0))
                except Exception as e: print("TWO", repr(e)[:200])
            print(out)
    finally: s.close()

def test_carry_blocks_other_size():
    s = svc(max_jobs=10, max_session_share=1.0)
    try:
        with s.client() as c:
            with c.open_batch(1, 4, keep="all") as b:
                b.feed(endless()); assert b.next_group(10)
            time.sleep(2)
            st=c.status(); print("CARRY uncollected", st.uncollected, st.queued, st.running)
            with c.open_batch(1, 5, keep="all") as b:
                b.feed(endless())
                try: print("CARRY", b.next_group(6.0))
                except Exception as e: print("CARRY", repr(e)[:200])
    finally: s.close()

def test_bad_prompt_forever():
    s = svc()
    try:
        with s.client() as c:
            for name, bad in (("badid", msgspec.structs.replace(scripted(eval="one"), job_id="bad id!")),
                        ("numid", msgspec.structs.replace(scripted(eval="one"), job_id=7)),
                        ("numtask", msgspec.structs.replace(scripted(eval="one"), task=7)),
                        ("longid", msgspec.structs.replace(scripted(eval="one"), job_id="x"*5000)),
                        ("wide", msgspec.structs.replace(scripted(), instance={"run": [[]]*70000})),
                        ("deep", None)):
                if name=="deep":
                    x=[]
                    for _ in range(600): x=[x]
                    bad=msgspec.structs.replace(scripted(), instance={"run":x})
                b = c.open_batch(1, 2, keep="all")
                b.feed([bad, scripted(), scripted()])
                n=0; res=None; errs=[]
                for _ in range(4):
                    try: res=b.next_group(5); break
                    except Exception as e: errs.append(f"{type(e).__name__}: {str(e)[:90]}")
                print("BAD", name, "group" if res else "NOGROUP", b.state, errs)
                b.close()
    finally: s.close()

def test_close_twice():
    s = svc()
    try:
        with s.client() as c:
            o=BatchOptions(target_groups=1, group_size=2)
            print(raw(s, OpenBatch("r0","sess","bb",o)))
            m=CloseBatch("r1","sess","bb")
            print("CLOSE", type(raw(s,m)).__name__, raw(s,m))
    finally: s.close()

def test_prompt_at_limit():
    s = svc(job_limit_bytes=4096)
    try:
        with s.client() as c:
            j=msgspec.structs.replace(scripted(eval="one"), job_id="p")
            pad=4096-len(codec.encode(msgspec.structs.replace(j, instance={**j.instance,"mark":"", "command":""})))
            for k in range(0,12):
                jj=msgspec.structs.replace(j, instance={**j.instance,"mark":"","command":"x"*(pad-k)})
                if len(codec.encode(jj))<=4096: break
            print("LIMIT size",len(codec.encode(jj)))
            b=c.open_batch(1,2,keep="all"); b.feed([jj])
            try: print("LIMIT", b.next_group(10), b.state, b.report)
            except Exception as e: print("LIMIT", repr(e)[:300])
    finally: s.close()
