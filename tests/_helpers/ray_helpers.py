"""Engines that misbehave inside a worker process, and a Ray that runs in this one."""

import copy
import os
import random
import signal
import time
from collections import deque
from pathlib import Path

from pfl_lightning import SequentialEngine


class DiesOnce(SequentialEngine):
    """Kills its process in the middle of a client's fit, the first time; a file remembers it."""

    def __init__(self, folder, client, times=1):
        super().__init__()
        self.folder, self.client, self.times = str(folder), client, times

    def run_phase(self, client, phase, context, environment, purpose):
        losses = super().run_phase(client, phase, context, environment, purpose)
        marks = [Path(self.folder, f"died-{time}") for time in range(self.times)]
        fresh = next((mark for mark in marks if not mark.exists()), None)
        if context.client == self.client and context.round == 1 and fresh is not None:
            fresh.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return losses


class Sleeps(SequentialEngine):
    """Takes a long time, after it has left a file that says so."""

    def __init__(self, folder, seconds=600.0):
        super().__init__()
        self.folder, self.seconds = str(folder), seconds

    def run_phase(self, client, phase, context, environment, purpose):
        Path(self.folder, "sleeping").touch()
        time.sleep(self.seconds)
        return super().run_phase(client, phase, context, environment, purpose)


class Unlucky(Exception):
    """An exception that does not survive pickling."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Raises(SequentialEngine):
    """Fails with an exception of its own."""

    def run_phase(self, client, phase, context, environment, purpose):
        if context.client == 2:
            raise Unlucky("wind", "rain")
        return super().run_phase(client, phase, context, environment, purpose)


class NotHere:
    """Cannot be unpickled."""

    def __reduce__(self):
        return __import__, ("a_module_of_the_users_that_is_not_there",)


class Locked:
    """Cannot be pickled."""

    def __reduce__(self):
        raise TypeError("cannot pickle 'lock' object")


class Reference:
    """Reference to an object or to a future result, as Ray returns it."""

    def __init__(self, compute):
        self.compute = compute

    def __deepcopy__(self, memo):
        return self


class FakeRay:
    """Enough of Ray for a WorkerPool, in this process: a call runs when its result is asked for.

    The actors' answers come in a random order, and what goes to an actor or comes back is copied at that moment.

    Args:
        deaths: How often a worker dies on a payload, by how many payloads were handed out before.
        seed: Of the order.
    """

    class exceptions:
        class RayError(Exception):
            pass

    def __init__(self, deaths=(), seed=0):
        self.deaths, self.calls, self.actors, self.killed = deque(deaths), 0, 0, 0
        self.random, self.used = random.Random(seed), set()

    def put(self, value):
        kept = copy.deepcopy(value)
        return Reference(lambda: kept)

    def get(self, reference):
        return reference.compute()

    def wait(self, references, num_returns, timeout):
        ready = self.random.choice(references)
        return [ready], [reference for reference in references if reference is not ready]

    def kill(self, actor):
        self.killed += 1

    def available_resources(self):
        return {"CPU": 0.0}

    def remote(self, cls):
        ray = self

        class Handle:
            def __init__(self, *args, get):
                ray.actors += 1
                self.worker = cls(*args, get=get)
                self.dead = False

            def __getattr__(self, name):
                def remote(*args):
                    counted = name in ("fit", "evaluate")
                    ray.calls += counted
                    sent = copy.deepcopy(args)
                    dies = counted and bool(ray.deaths) and ray.deaths[0] == ray.calls
                    if dies:
                        ray.deaths.popleft()

                    def compute():
                        if self.dead or dies:
                            self.dead = True
                            raise ray.exceptions.RayError("the worker was killed")
                        if counted:
                            ray.used.add(id(self))
                        return copy.deepcopy(getattr(self.worker, name)(*sent))

                    return Reference(compute)

                return type("Method", (), {"remote": staticmethod(remote)})

        class Maker:
            @staticmethod
            def options(**options):
                return type("Options", (), {"remote": staticmethod(Handle)})

        return Maker
