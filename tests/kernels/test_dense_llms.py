"""The table of dense models: what is in it, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from foretune.datasets import DatasetError, ForetuneError
from foretune.kernels.workloads import COLUMNS, load_dense_models

SMALL = "Tiny-1B,64,128,4,2,16,1000"


def test_the_shipped_models_split_into_whole_parts() -> None:
    models = load_dense_models()
    assert len({model.model for model in models}) >= 20
    for model in models:
        for degree in filter(model.splits, (1, 2, 4, 8)):
            whole, part = model.linear_layers(), model.linear_layers(degree)
            assert part["gate_up"][0] * degree == whole["gate_up"][0]
            assert part["o"][1] * degree == whole["o"][1]
            assert part["qkv"][0] * degree >= whole["qkv"][0]  # more where key and value heads are repeated
            assert part["lm_head"][0] * degree >= model.vocab_size
            assert all(n % 8 == 0 and k % 8 == 0 for n, k in part.values())


def test_key_and_value_heads_are_repeated_on_more_ranks_than_there_are(tmp_path: Path) -> None:
    path = tmp_path / "models.csv"
    path.write_text(",".join(COLUMNS) + f"\n{SMALL}\n")
    (model,) = load_dense_models(path)
    assert model.heads_on_rank(2) == (2, 1)
    assert model.heads_on_rank(4) == (1, 1)
    with pytest.raises(ForetuneError, match="Tiny-1B cannot be split over 3 ranks"):
        model.linear_layers(3)


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        (SMALL.replace(",2,16", ",5,16"), "line 2, num_kv_heads"),  # more than query heads
        (SMALL.replace("64,128", "60,128"), "line 2, hidden_size: must be a multiple of 8 but is 60"),
        (SMALL.replace("1000", "none"), "line 2, vocab_size"),
        (f"{SMALL}\n{SMALL}", "line 3, model: 'Tiny-1B' is already in line 2"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, row: str, wrong: str) -> None:
    path = tmp_path / "models.csv"
    path.write_text(",".join(COLUMNS) + f"\n{row}\n")
    with pytest.raises(DatasetError, match=wrong):
        load_dense_models(path)
