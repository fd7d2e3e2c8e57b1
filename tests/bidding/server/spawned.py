"""Replicas of tests/bidding/server/test_http.py. Each of them imports this file, which imports no torch:
that would take them seconds.
"""

import os
import signal
import sys
import time


def leave(number, beat):
    sys.exit(1)


def lives(folder, number, beat):
    """A replica whose first life ends, whose second and third hang or end, and then it is well."""
    life = len(list(folder.iterdir()))
    (folder / str(life)).touch()
    beat()
    while life > 2:
        beat()
        time.sleep(0.01)
        if life == 3:
            os.kill(os.getppid(), signal.SIGTERM)  # enough was seen
    if life == 1:
        time.sleep(300)
    os._exit(7)
