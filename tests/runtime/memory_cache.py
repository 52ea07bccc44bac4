"""A choice cache in memory: what `attach` asks of one, and nothing else."""

from __future__ import annotations


class MemoryCache:
    """`disk` stands for the disk: what several of them share."""

    def __init__(self, disk):
        self.disk = disk

    @classmethod
    def module(cls, disk):
        """What is imported as `kernel_cache`."""

        class Module:
            class ChoiceCache:
                @staticmethod
                def of(kernel, source_hash, device):
                    return cls(disk.setdefault((kernel, source_hash, device.name), {"times": {}, "chosen": {}}))

        return Module

    def times(self, problem):
        return dict(self.disk["times"].get(problem, {}))

    def problems(self):
        return list(self.disk["times"])

    def record(self, problem, config, time_us):
        self.disk["times"].setdefault(problem, {})[config] = time_us

    def saw_launch(self, problem, names, key, arguments, config=None):
        self.disk.setdefault("launches", {}).setdefault(problem, []).append((names, key, arguments))

    def choose(self, problem, bundle, config):
        self.disk["chosen"][problem, bundle] = config

    def choice(self, problem, bundle):
        return self.disk["chosen"].get((problem, bundle))
