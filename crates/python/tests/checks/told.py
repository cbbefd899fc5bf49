"""A process that is told to end while it has something to finish."""

import multiprocessing
import os
import signal
import time

from tools import raises
from unisono.torch._gradients.told import Told


def check_told(rank, world):
    told = Told()
    with told.listening():
        # A child that is told to end has nothing to finish, whenever it hears that.
        for pause in [0] * 20 + [0.2]:
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(900,))
            child.start()
            time.sleep(pause)
            child.terminate()
            child.join(60)
            assert child.exitcode == -signal.SIGTERM and not told.is_told, child.exitcode
        os.kill(os.getpid(), signal.SIGTERM)
        assert told.is_told
        # The second time at once.
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert raises(SystemExit, told.idle().__enter__).code == 143
    idle = Told()
    with idle.listening(), idle.idle():
        assert raises(SystemExit, os.kill, os.getpid(), signal.SIGTERM).code == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    # A program's own handler stays.
    heard = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append(True))
    with told.listening():
        os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [True]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
