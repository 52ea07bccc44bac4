"""`python saving.py WHAT COUNT FOLDER`: saves bundles beside each other, beside readers, and is killed while it does;
prints what went wrong, a JSON list. A process of its own, because it forks."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path

from foretune.model import load_bundle
from forging import hand_made

BUNDLES = [hand_made(seed=seed) for seed in (1, 2)]
DIGESTS = {bundle.digest for bundle in BUNDLES}


def forked(work):
    """A process that does the work and ends."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return pid


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def trouble(folder, debris=True):
    """What is wrong with a folder that was saved into."""
    try:
        digest = load_bundle(folder).digest
    except Exception as error:  # noqa: BLE001 - told
        return f"{type(error).__name__}: {error}"
    others = sorted({path.name for path in folder.iterdir()} - {"bundle.npz"})
    return "another bundle" if digest not in DIGESTS else f"debris: {others}" if debris and others else None


def save_side_by_side(count, folder):
    """Two processes save once each, at once; each time into what the last two left."""
    for _ in range(count):
        read, write = os.pipe()

        def save(bundle, gate=(read, write)):
            os.close(gate[1])
            os.read(gate[0], 1)  # until the parent closes its end
            bundle.save(folder)

        pids = [forked(lambda bundle=bundle: save(bundle)) for bundle in BUNDLES]
        os.close(read)
        os.close(write)
        yield from (f"a writer ended with {code}" for code in map(ended, pids) if code)
        yield trouble(folder)


def killed_at(event, folder, bundle):
    """Saves, and is killed at the event-th line that Python runs from when it first touches the disk. Returns whether
    it came to that."""

    def work():
        left, begun = event, False

        def count(frame, what, argument):
            nonlocal left, begun
            begun = begun or frame.f_code.co_name == "mkdir"
            left -= begun
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return count

        sys.settrace(count)
        bundle.save(folder)

    return ended(forked(work)) == -signal.SIGKILL


def save_and_be_killed(count, folder):
    """Kills spread over all that a save does; each time into what the last one left."""
    draw = random.Random(0)
    most = 1
    while killed_at(most, folder, BUNDLES[0]):
        most += 100
    for number in range(count):
        BUNDLES[number % 2].save(folder)
        yield trouble(folder)
        killed_at(draw.randrange(1, most), folder, BUNDLES[1 - number % 2])
        yield trouble(folder, debris=False)
    BUNDLES[0].save(folder)
    yield trouble(folder)


def read_beside_saves(count, folder):
    """One process saves for ever; this one reads."""

    def save_for_ever():
        number = 0
        while True:
            BUNDLES[number % 2].save(folder)
            number += 1

    BUNDLES[0].save(folder)
    writer = forked(save_for_ever)
    try:
        for _ in range(count):
            yield trouble(folder, debris=False)
    finally:
        os.kill(writer, signal.SIGKILL)
        ended(writer)
    BUNDLES[0].save(folder)
    yield trouble(folder)


if __name__ == "__main__":
    what = {"doubles": save_side_by_side, "kills": save_and_be_killed, "reads": read_beside_saves}[sys.argv[1]]
    print(json.dumps([wrong for wrong in what(int(sys.argv[2]), Path(sys.argv[3])) if wrong]))  # noqa: T201
