"""A module whose import takes too much memory, so that the system kills the process."""

import os
import signal

print("importing")
os.kill(os.getpid(), signal.SIGKILL)
