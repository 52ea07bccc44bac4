"""Triton's hash of itself: made once, in another thread, kept for the next process, and never another than Triton's."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from threading import get_ident

import pytest
from foretune.runtime import use_stub_driver
from foretune.runtime.launching import ahead

cache = pytest.importorskip("triton.runtime.cache")


class Hashing:
    """Triton's hash of an installation of two files."""

    def __init__(self, root, own):
        self.root, self.threads, self.intervals = root, [], []
        self.file = Path(own) / "foretune-triton-key.json"

    def __call__(self):
        self.threads.append(get_ident())
        self.intervals.append(sys.getswitchinterval())
        return f"hash of {(self.root / 'language' / 'core.py').read_text()}"

    def of_a_new_process(self):
        """What a process compiles with that finds the disk as it is."""
        cache.triton_key = self
        ahead.hash_triton_ahead()
        ahead.hash_triton_ahead()
        ahead.wait_for_the_hash()
        return cache.triton_key()


@pytest.fixture
def hashing(monkeypatch, tmp_path, own_cache):
    triton = pytest.importorskip("triton")
    for name in ("language/core.py", "_C/libtriton.so"):
        (tmp_path / "triton" / name).parent.mkdir(parents=True)
        (tmp_path / "triton" / name).write_text("one")
    monkeypatch.setattr(triton, "__file__", str(tmp_path / "triton" / "__init__.py"))
    monkeypatch.setattr(ahead._jobs, "underway", {})
    monkeypatch.setattr(ahead, "_known", [])
    hashing = Hashing(tmp_path / "triton", triton.knobs.cache.dir)
    monkeypatch.setattr(cache, "triton_key", hashing)
    return hashing


def test_it_is_made_once_in_another_thread_that_gets_pythons_lock_soon(hashing):
    usual = sys.getswitchinterval()
    ahead.hash_triton_ahead()
    ahead.hash_triton_ahead()
    ahead.wait_for_the_hash()
    assert len(hashing.threads) == 1
    assert hashing.threads[0] != get_ident()
    assert hashing.intervals[0] < usual == sys.getswitchinterval()
    assert cache.triton_key is hashing  # which remembers it itself


def test_who_has_not_begun_it_waits_for_nothing_and_lets_triton_do_it(hashing):
    ahead.wait_for_the_hash()
    assert hashing.threads == []
    assert cache.triton_key is hashing


def test_the_next_process_finds_it_and_hashes_nothing(hashing):
    first = hashing.of_a_new_process()
    made = len(hashing.threads)
    assert hashing.of_a_new_process() == first == "hash of one"
    assert len(hashing.threads) == made
    assert hashing.file.stat().st_mode & 0o77 == 0


def test_a_process_is_given_it_once(hashing, monkeypatch):
    hashing.of_a_new_process()
    made = len(hashing.threads)
    ahead.hash_triton.cache_clear()
    cache.triton_key = hashing
    ahead.hash_triton()
    assert cache.triton_key() == "hash of one"
    assert len(hashing.threads) == made
    cache.triton_key = hashing
    ahead.hash_triton()
    assert cache.triton_key is hashing


@pytest.mark.compile
@pytest.mark.parametrize("way", ["attach", "foretune.autotune"])
def test_the_first_launch_of_a_tuned_kernel_finds_it(way, own_cache, filler, monkeypatch):
    """Triton would hash its installation in the launch, which is most of a first launch with cached binaries."""
    import foretune
    import triton

    monkeypatch.setattr(ahead._jobs, "underway", {})
    monkeypatch.setattr(ahead, "_known", [])
    ahead._hash()  # an earlier process
    ahead.hash_triton.cache_clear()
    hashed = []
    monkeypatch.setattr(cache, "triton_key", lambda: hashed.append(1) or "another hash")
    declare = triton.autotune if way == "attach" else foretune.autotune
    kernel = declare(filler.configs((1, 2)), ["M", "N"])(triton.jit(filler.fill_kernel))
    with use_stub_driver(filler.H200):
        if way == "attach":
            foretune.attach(kernel)
        filler.launch(kernel)
    assert hashed == []


@pytest.mark.parametrize("name", ["language/core.py", "_C/libtriton.so", "language/new.py"])
def test_another_installation_is_hashed_anew(hashing, name):
    hashing.of_a_new_process()
    (hashing.root / name).write_text("two")
    made = len(hashing.threads)
    assert hashing.of_a_new_process() == f"hash of {'two' if name.endswith('core.py') else 'one'}"
    assert len(hashing.threads) > made


def test_a_file_put_back_with_its_size_and_its_time_is_another(hashing):
    path = hashing.root / "language" / "core.py"
    hashing.of_a_new_process()
    was = path.stat()
    path.write_text("two")
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert hashing.of_a_new_process() == "hash of two"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"key": "k"}', '{"fingerprint": "F", "key": 1}', "\udcff", "[" * 60_000]
)
def test_a_file_that_says_nothing_is_written_anew(hashing, text):
    hashing.of_a_new_process()
    said = json.loads(hashing.file.read_text())
    hashing.file.write_text(text.replace("F", said["fingerprint"]), errors="surrogateescape")
    assert hashing.of_a_new_process() == "hash of one"
    assert json.loads(hashing.file.read_text()) == said


def test_where_nothing_can_be_written_every_process_hashes(hashing, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(hashing.root / "language" / "core.py"))  # a file, not a folder
    assert hashing.of_a_new_process() == hashing.of_a_new_process() == "hash of one"


def test_tritons_own_hash_of_the_real_installation_is_what_the_next_process_is_told(own_cache, monkeypatch):
    """And the fingerprint is of files that are there: the library, and the language."""
    monkeypatch.setattr(ahead._jobs, "underway", {})
    monkeypatch.setattr(ahead, "_known", [])
    import triton

    files = [path for part in ahead._HASHED for path in ahead._files(f"{Path(triton.__file__).parent}/{part}")]
    names = {Path(path).name for path in files}
    assert names >= {"libtriton.so", "core.py", "cache.py", "compiler.py"}
    own = cache.triton_key
    ahead._hash()
    ahead._hash()
    assert ahead._known == [own()]
