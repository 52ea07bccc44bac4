"""What is written around the tensors of a launch is found, wherever it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from foretune.runtime.launching.results import REDZONE_BYTES, Redzones, poison


class Pair(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor


@dataclass(frozen=True)
class Inputs:
    x: torch.Tensor
    both: Pair
    more: list[torch.Tensor]
    nothing: None = None


def inputs():
    joint = torch.arange(24.0).view(2, 12)  # q and k are parts of its rows, and the last columns of no tensor
    return Inputs(torch.ones(3, 5), Pair(joint[:, :4], joint[:, 4:8]), [torch.ones(2, dtype=torch.int64)])


def test_tensors_keep_their_values_their_strides_and_what_they_share():
    made, before = inputs(), inputs()
    redzones = Redzones(made)
    for now, then in ((made.x, before.x), (made.both.q, before.both.q), (made.both.k, before.both.k)):
        assert torch.equal(now, then)
        assert now.stride() == then.stride()
        assert now.data_ptr() % 16 == then.data_ptr() % 16
    assert made.both.q.untyped_storage().data_ptr() == made.both.k.untyped_storage().data_ptr()
    made.x.fill_(7.0)
    made.both.q.fill_(7.0)
    assert redzones.overwritten() is None
    redzones.restore()
    assert torch.equal(made.x, before.x)
    assert torch.equal(made.both.q, before.both.q)


@pytest.mark.parametrize(
    ("place", "at", "message"),
    [
        (lambda made: made.x, 15, "4 bytes outside of x, starting 0 bytes after its end"),
        (lambda made: made.x, 17, "4 bytes outside of x, starting 8 bytes after its end"),
        (lambda made: made.x, -1, "4 bytes outside of x, ending 0 bytes before its start"),
        (lambda made: made.x, REDZONE_BYTES // 4 + 14, f"starting {REDZONE_BYTES - 4} bytes after its end"),
        (lambda made: made.both.q, 9, "outside of q and k, around it or between its rows"),
        (lambda made: made.more[0], 2, r"8 bytes outside of more\[0\], starting 0 bytes after its end"),
    ],
)
def test_what_is_written_around_a_tensor_is_found(place, at, message):
    made = inputs()
    redzones = Redzones(made)
    tensor = place(made)
    tensor.as_strided((1,), (1,), tensor.storage_offset() + at).fill_(0)
    with pytest.raises(AssertionError, match=message):
        assert redzones.overwritten() is None, redzones.overwritten()
    redzones.restore()
    assert redzones.overwritten() is None


def test_a_tensor_that_was_changed_is_found_unless_it_may_be():
    made = inputs()
    redzones = Redzones(made)
    made.x.fill_(7.0)
    made.both.q.fill_(7.0)
    assert redzones.changed([made.x, made.both.q]) is None
    assert redzones.changed([made.both.q]) == "x"
    assert redzones.changed([made.x, made.both.k]) == "q"
    redzones.restore()
    assert redzones.changed([]) is None


def test_what_a_tensor_shares_with_one_that_may_change_may_change_too():
    held = torch.zeros(4)
    made = {"all": held, "part": held[1:3]}
    redzones = Redzones(made)
    made["part"].fill_(1.0)
    assert redzones.changed([made["part"]]) is None
    made["all"].fill_(1.0)
    assert redzones.changed([made["part"]]) == "all"
    assert redzones.changed([made["all"]]) is None


def test_a_boolean_keeps_a_byte_that_is_neither_true_nor_false():
    made = {"mask": poison(torch.zeros(4, dtype=torch.bool))}
    redzones = Redzones(made)
    assert redzones.overwritten() is None
    made["mask"].fill_(True)
    redzones.restore()
    assert made["mask"].view(torch.uint8).eq(255).all()


def test_what_was_read_in_one_redzone_is_seen_in_another():
    made = {"x": torch.ones(4), "y": torch.ones(4)}
    redzones = Redzones(made)
    read = made["x"].as_strided((2,), (1,), made["x"].storage_offset() + 4)
    made["y"].as_strided((2,), (1,), made["y"].storage_offset() + 4).copy_(read)
    assert "outside of y" in redzones.overwritten()


def test_expanded_and_empty_tensors_have_redzones_too():
    made = {"row": torch.ones(3).expand(4, 3), "empty": torch.ones(0)}
    redzones = Redzones(made)
    assert made["row"].tolist() == [[1.0] * 3] * 4
    made["row"][0].fill_(2.0)
    assert redzones.overwritten() is None
    made["empty"].as_strided((1,), (1,), made["empty"].storage_offset()).fill_(0)
    assert redzones.overwritten().startswith("4 bytes outside of empty, starting 0 bytes")
