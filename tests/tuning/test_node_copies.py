"""A job's many ranks read a shared file once a node: counted with 512 of them, and with real processes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import foretune
import pytest
from foretune import ForetuneWarning
from foretune.datasets import ForetuneError
from foretune.runtime import node_copies
from foretune.runtime.node_copies import copied, near_copy

READERS = Path(__file__).parents[1] / "node_readers.py"
NODES, RANKS_OF_NODE = 64, 8


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr("foretune.runtime.arguments._warned", set())
    for name in ("FORETUNE_NODE_DIR", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def shared(tmp_path):
    path = tmp_path / "shared" / "choices.json"
    path.parent.mkdir()
    path.write_text("{}")
    return path


class FileServer:
    """Counts who reads."""

    def __init__(self):
        self.reads, self.pauses, self.lock = [], [], threading.Lock()

    def read(self, path):
        with self.lock:
            self.reads.append(path)
        return path.read_bytes()


def test_of_512_ranks_on_64_nodes_64_read(shared, tmp_path, monkeypatch):
    """Each rank is a thread, with a lock of its own as a process has: it is of the opened file, not of the process."""
    monkeypatch.setenv("WORLD_SIZE", str(NODES * RANKS_OF_NODE))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(RANKS_OF_NODE))
    server, together = FileServer(), threading.Barrier(NODES * RANKS_OF_NODE)

    def rank(number):
        together.wait()
        node = tmp_path / f"node{number % NODES}"
        return copied(shared, node, read=server.read, sleep=server.pauses.append).read_text()

    with ThreadPoolExecutor(NODES * RANKS_OF_NODE) as ranks:
        texts = list(ranks.map(rank, range(NODES * RANKS_OF_NODE)))
    assert texts == ["{}"] * 512
    assert server.reads == [shared] * NODES
    assert len(server.pauses) == NODES
    assert len(set(server.pauses)) > NODES / 2  # they do not come at once
    assert 0 <= min(server.pauses) < max(server.pauses) <= NODES * node_copies._PAUSE_S_PER_NODE


def test_of_four_processes_on_two_nodes_two_read(shared, tmp_path):
    children = [
        subprocess.Popen(
            [sys.executable, READERS, shared, "3"],
            env=os.environ | {"FORETUNE_NODE_DIR": str(tmp_path / f"node{rank % 2}"), "PYTHONPATH": ":".join(sys.path)},
            stdout=subprocess.PIPE,
        )
        for rank in range(4)
    ]
    told = [json.loads(child.communicate()[0]) for child in children]
    assert [one["texts"] for one in told] == [["{}"]] * 4
    assert [sum(one["opened"] for one in told[node::2]) for node in (0, 1)] == [1, 1]


def test_processes_of_their_own_are_seen_to_read_it(shared):
    child = subprocess.run(
        [sys.executable, READERS, shared, "3"],
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        check=True,
    )
    assert json.loads(child.stdout)["opened"] == 3


def test_a_file_that_is_not_there_is_looked_for_once(tmp_path):
    server = FileServer()
    for _ in range(3):
        assert not copied(tmp_path / "gone.json", tmp_path / "node", read=server.read).exists()
    assert len(server.reads) == 1


def test_who_dies_while_reading_leaves_it_to_the_next(shared, tmp_path):
    def die(path):
        raise SystemExit

    with pytest.raises(SystemExit):
        copied(shared, tmp_path / "node", read=die)
    assert copied(shared, tmp_path / "node").read_text() == "{}"


def test_a_copy_stays_as_it_was_while_the_file_changes(shared, tmp_path):
    copy = copied(shared, tmp_path / "node")
    shared.write_text("{1}")
    assert copied(shared, tmp_path / "node") == copy
    assert copy.read_text() == "{}"


def test_files_of_one_name_are_told_apart_by_their_folders(shared, tmp_path):
    other = tmp_path / "other" / shared.name
    other.parent.mkdir()
    other.write_text("[]")
    assert [copied(path, tmp_path / "node").read_text() for path in (shared, other)] == ["{}", "[]"]


class Distributed:
    """`torch.distributed` of a job of so many ranks, of which this is one."""

    def __init__(self, monkeypatch, ranks, local=None):
        self.rank, self.ranks, self.values = 1, ranks, {}
        self.group = SimpleNamespace(WORLD=SimpleNamespace(get_group_store=lambda: self))
        monkeypatch.setitem(sys.modules, "torch.distributed", self)
        if local is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))

    is_available = is_initialized = staticmethod(lambda: True)

    def get_world_size(self):
        return self.ranks

    def get_rank(self):
        return self.rank

    def PrefixStore(self, prefix, store):  # noqa: N802 - as torch calls it
        return self

    def compare_set(self, key, expected, desired):
        return self.values.setdefault(key, desired.encode())


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """The node's folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(node_copies, "_PAUSE_S_PER_NODE", 0.0)
    return tmp_path


def test_a_job_of_several_nodes_has_copies_of_its_own(shared, temporary, monkeypatch):
    copies = []
    for _ in range(2):
        Distributed(monkeypatch, ranks=16, local=8)
        copies += [near_copy(shared), near_copy(shared)]
    assert copies[0] == copies[1] != copies[2]
    assert temporary in copies[0].parents
    assert stat.S_IMODE((temporary / f"foretune-{os.getuid()}").stat().st_mode) == 0o700
    assert copies[0].read_text() == "{}"


@pytest.mark.parametrize(("ranks", "local"), [(8, 8), (1, None)])
def test_a_process_or_a_node_of_its_own_needs_none(shared, temporary, monkeypatch, ranks, local):
    assert near_copy(shared) is shared
    Distributed(monkeypatch, ranks, local)
    assert near_copy(shared) is shared


@pytest.mark.parametrize("local", [None, "many", "0", "-3"])
def test_where_nothing_says_how_many_share_a_node_each_counts_as_one(shared, temporary, monkeypatch, local):
    Distributed(monkeypatch, 8, local)
    assert near_copy(shared) != shared


def test_the_first_rank_has_what_it_updates_itself(shared, temporary, monkeypatch):
    job = Distributed(monkeypatch, 16, 8)
    assert near_copy(shared, writes=True) != shared
    job.rank = 0
    assert near_copy(shared, writes=True) is shared
    assert near_copy(shared) != shared


def test_a_folder_that_others_can_write_to_is_not_trusted(shared, temporary, monkeypatch):
    Distributed(monkeypatch, 16, 8)
    (temporary / f"foretune-{os.getuid()}").mkdir()
    (temporary / f"foretune-{os.getuid()}").chmod(0o777)
    with pytest.warns(
        ForetuneWarning, match="must be a folder that only this user can access.*each process reads its own"
    ):
        assert near_copy(shared) is shared


def test_where_no_copy_can_be_made_the_file_itself_is_read(shared, monkeypatch):
    monkeypatch.setenv("FORETUNE_NODE_DIR", str(shared))  # a file
    with pytest.warns(ForetuneWarning, match="this node has no copies of files"):
        assert near_copy(shared) is shared
    job = Distributed(monkeypatch, 16, 8)
    monkeypatch.delenv("FORETUNE_NODE_DIR")
    job.group = None
    with pytest.warns(ForetuneWarning, match="this node has no copies of files"):
        assert near_copy(shared) is shared


def test_a_bundle_is_read_once_a_node(tmp_path, monkeypatch):
    from foretune.model import load_bundle

    load_bundle().save(tmp_path / "mine")
    before = foretune.prune("grouped_gemm_fwd", bundle=tmp_path / "mine").bundle
    monkeypatch.setenv("FORETUNE_NODE_DIR", str(tmp_path / "node"))
    foretune.prune("grouped_gemm_fwd", bundle=tmp_path / "mine")
    (tmp_path / "mine" / "bundle.npz").unlink()
    assert foretune.prune("grouped_gemm_fwd", bundle=tmp_path / "mine").bundle.digest == before.digest
    with pytest.raises(foretune.ForetuneError, match=f"{tmp_path}/none/bundle.npz: no such file"):
        foretune.prune("grouped_gemm_fwd", bundle=tmp_path / "none")


@pytest.mark.parametrize("name", [".choices.json.lock", ".choices.json.read", "choices.json"])
def test_nothing_is_written_through_a_link_in_the_nodes_folder(name, shared, tmp_path):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "node"
    elsewhere.write_text("somebody's")
    copies = copied(shared, folder).parent
    for path in copies.iterdir():
        path.unlink()
    if name == ".choices.json.read":
        elsewhere = tmp_path / "to come"
    (copies / name).symlink_to(elsewhere)
    before = elsewhere.exists() and elsewhere.read_text()
    if name == "choices.json":
        assert copied(shared, folder).read_text() == "{}"
    else:
        with pytest.raises(ForetuneError, match="it is a symbolic link"):
            copied(shared, folder)
    assert (elsewhere.exists() and elsewhere.read_text()) == before
