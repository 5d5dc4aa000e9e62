from __future__ import annotations
import itertools, os, time, tempfile, random, threading, sqlite3
from pathlib import Path
import msgspec, pytest
from prorl_zmq.errors import *
from .conftest import scripted, until
from .test_restarts import KillableService, SETTINGS

def endless(pre):
    for n in itertools.count():
        yield msgspec.structs.replace(scripted(eval="alternate"), job_id=f"{pre}-{n}")

def test_kill_many():
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        s = KillableService(Path(folder), SETTINGS)
        try:
            s.start_backend_broker(); s.start_rollout_broker(); s.start_stages()
            over = threading.Event(); kills=[0]
            def killer():
                r=random.Random(5)
                end=time.monotonic()+70
                while time.monotonic()<end and not over.is_set():
                    time.sleep(r.uniform(0.3,2.5))
                    s.kill_rollout_broker(); s.start_rollout_broker(); kills[0]+=1
                over.set()
            t=threading.Thread(target=killer)
            seen={}; jobs=set(); prompts={}; bad=[]; errs=[]; nb=0
            with s.client() as c:
                t.start()
                streams={}
                i=0
                while not over.is_set():
                    size=(2,4,3,8)[i%4]; carry=("running","finished","running","nothing")[(i//3)%4]
                    try:
                        b=c.open_batch(3,size,carry=carry,lease_s=60.0, keep="informative" if i%2 else "all")
                        b.feed(endless(f"b{i}"), last=True)
                        got=0
                        for g in b:
                            got+=1
                            ids=[x.job_id for x in g.trajectories]
                            if len(ids)!=size or len(set(ids))!=size: bad.append(("size",g.group_id,ids))
                            for x in ids:
                                if x in jobs: bad.append(("dupjob",x,g.group_id,i))
                                jobs.add(x)
                            if g.prompt_id in prompts: bad.append(("dupprompt",g.prompt_id,prompts[g.prompt_id],i,g.group_id))
                            prompts[g.prompt_id]=i
                        if got!=3: bad.append(("count",i,got,b.state,b.report))
                        b.close()
                        if b.report.failed: errs.append((i,"failed",b.report.failed, b.report.given_up))
                    except Exception as e:
                        errs.append((i,repr(e)[:200]))
                        time.sleep(0.1)
                    i+=1
                t.join()
                st=c.status(timeout_s=30)
                print("batches run",i,"kills",kills[0],"groups",len(prompts)); print("BAD",bad[:10],len(bad)); print("ERRS",errs[:12],len(errs))
                print("status",st.batches,st.uncollected,st.queued,st.running)
                # let the session lapse
                b=c.open_batch(1,2,lease_s=2.0); b.close()
            time.sleep(8)
            with s.client() as c:
                st=c.status(); print("after",st.batches,st.uncollected,st.queued,st.running)
            db=sqlite3.connect(f"file:{s.folder}/rollout.journal?mode=ro",uri=True)
            for tb in ("jobs","states","blocks","results","notes"):
                print(tb, db.execute(f"select count(*) from {tb}").fetchone())
            print(db.execute("select name from notes limit 20").fetchall())
            logt=s.log()
            print("\n".join(l[:300] for l in logt.splitlines() if any(w in l for w in ("ERROR","Traceback","lost its","damaged")))[:3000])
        finally: s.close()
