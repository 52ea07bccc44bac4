"""A key-value store as `torch.distributed`'s, a clock that passes only when somebody sleeps, and ranks of both."""

from __future__ import annotations

from threading import Lock

from foretune.runtime.tuning.ranks.rendezvous import Rendezvous


class SharedStore:
    """In memory. `before(operation, key)` is called ahead of each operation: to note it, to act, or to refuse it."""

    def __init__(self, before=lambda operation, key: None):
        self.values, self.before, self.lock = {}, before, Lock()

    def check(self, keys):
        self.before("check", keys[0])
        return all(key in self.values for key in keys)

    def get(self, key):
        self.before("get", key)
        return self.values[key]  # the real one waits for what is not there: nobody may ask for it

    def set(self, key, value):
        self.before("set", key)
        self.values[key] = value.encode()

    def add(self, key, amount):
        self.before("add", key)
        with self.lock:
            self.values[key] = int(self.values.get(key, 0)) + amount
            return self.values[key]

    def compare_set(self, key, expected, desired):
        self.before("compare_set", key)
        with self.lock:
            if self.values.get(key, b"") == expected.encode():
                self.values[key] = desired.encode()
            return self.values[key]


class Clock:
    """Whoever sleeps moves it on, and `at` says what happens meanwhile: {second: what}."""

    def __init__(self, at=None):
        self.seconds, self.at = 0.0, dict(at or {})

    def now(self):
        return self.seconds

    def sleep(self, seconds):
        until = self.seconds + seconds
        while due := [second for second in self.at if second <= until]:
            event = self.at.pop(min(due))
            self.seconds = max(self.seconds, min(due))
            event()
        self.seconds = max(self.seconds, until)


def ranks(size, store, clock, patience_s=60.0):
    return [
        Rendezvous(store, rank, size, patience_s=patience_s, now=clock.now, sleep=clock.sleep) for rank in range(size)
    ]
