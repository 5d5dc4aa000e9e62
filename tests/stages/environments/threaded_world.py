"""An adapter whose import starts a thread, which a fork would lose."""

import os
import threading
import time

threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


class WhichProcess:
    """Says in which process it plays, and which one imported it."""

    slots = 1
    imported_in = os.getpid()

    def open(self, args, seed):
        del args, seed
        return {"observations": {"main": f"{os.getpid()} {self.imported_in}"}}

    def step(self, player, text): ...

    def close(self): ...
