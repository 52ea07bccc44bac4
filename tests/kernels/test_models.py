"""The table of models: what of it is shipped, what is taken of somebody's own, and what is refused, and how."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from foretune.datasets import Case, DatasetError, Problem
from foretune.kernels.workloads import load_models

HEADER = "model,num_experts,top_k,hidden_size,moe_intermediate_size"
GOOD = "A-1B,8,2,64,128"


def table(*rows: str) -> str:
    return "\n".join((HEADER, *rows, ""))


def test_every_shipped_model_belongs_to_a_model_family() -> None:
    for model in load_models():
        (family,) = Case(Problem.of("toy"), (f"{model.model}/w13",), "balanced").model_families
        assert family


@pytest.mark.parametrize(
    ("model", "w13", "w2"),
    [  # (N, K) by the published config.json
        ("Nemotron-3-Nano-30B-A3B", (1856, 2688), (2688, 1856)),  # relu2 without a gate
        ("Nemotron-3-Super-120B-A12B", (2688, 1024), (1024, 2688)),  # moe_latent_size 1024, without a gate
        ("Kimi-K3", (6144, 3584), (3584, 3072)),  # routed_expert_hidden_size 3584
        ("DeepSeek-V4-Pro", (6144, 7168), (7168, 3072)),
        ("Step-3.7-Flash", (2560, 4096), (4096, 1280)),
    ],
)
def test_projections_are_those_of_the_published_model(model, w13, w2) -> None:
    (found,) = (one for one in load_models() if one.model == model)
    assert found.projections() == {"w13": w13, "w2": w2}


@pytest.mark.parametrize(
    ("columns", "fields", "w13"),
    [
        ("", "", (256, 64)),
        (",gated", ",no", (128, 64)),
        (",gated", ", yes ", (256, 64)),
        (",expert_hidden_size", ",32", (256, 32)),
        (",gated,expert_hidden_size", ",,", (256, 64)),
    ],
)
def test_columns_that_few_models_need_may_be_left_out_or_empty(tmp_path: Path, columns, fields, w13) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f"{HEADER}{columns}\n{GOOD}{fields}\n")
    (model,) = load_models(path)
    assert model.projections() == {"w13": w13, "w2": (w13[1], 128)}


@pytest.mark.parametrize(
    "content",
    [
        table(GOOD).encode(),
        table(GOOD).encode("utf-8-sig"),  # as Excel writes it
        table(GOOD).replace("\n", "\r\n").encode(),
        table("", GOOD, "", "").encode(),
        table('"A-1B", 8 ,2,64,128').encode(),
        b"top_k,model,num_experts,moe_intermediate_size,hidden_size\n2,A-1B,8,128,64",
    ],
)
def test_a_table_is_read_as_programs_write_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.csv"
    path.write_bytes(content)
    (model,) = load_models(path)
    assert (model.model, model.num_experts, model.top_k) == ("A-1B", 8, 2)
    assert model.projections() == {"w13": (256, 64), "w2": (64, 128)}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "columns missing: model"),
        ("\n\n", "columns missing: model"),
        ("model,num_experts\nA,8\n", "line 1: columns missing: top_k"),
        (HEADER + "\n", "no models"),
        (HEADER + ",notes\nA,8,2,64,64,good\n", "line 1: columns unknown: notes; the first line must be model,"),
        (HEADER + ",top_k\nA,8,2,64,64,2\n", "line 1: columns there twice: top_k"),
        (table(GOOD).replace(",", ";"), "line 1: columns missing: model, .*the first line must be model,num_experts"),
        (table("A,8,2,wide,64"), "line 2, hidden_size: must be a whole number from 8 to 1048576 but is 'wide'"),
        (f"{HEADER},gated\n{GOOD},maybe\n", "line 2, gated: must be yes or no but is 'maybe'"),
        (f"{HEADER},expert_hidden_size\n{GOOD},9\n", "line 2, expert_hidden_size: must be a multiple of 8 but is 9"),
        (table("A,8,2,,64"), "line 2, hidden_size: must be a whole number"),
        (table("A,8,2"), "line 2: must have 5 fields as the first line has, but 3"),
        (table(GOOD, "B,8,2,64,128,9"), "line 3: must have 5 fields as the first line has, but 6"),
        (table(",,,,"), "line 2, model: must be a name"),
        (table("7B,8,2,64,128"), "line 2, model: must be a name that begins with a letter.*'7B'"),
        (table("A\x1b[31m,8,2,64,128"), "line 2, model: must be a name"),
        (table("A" * 201 + ",8,2,64,128"), "line 2, model: .*at most 200 characters"),
        (table(GOOD, "", GOOD), "line 4, model: 'A-1B' is already in line 2"),
        (table("A,8,2,63,128"), "line 2, hidden_size: must be a multiple of 8 but is 63"),
        (table("A,8,2,64,129"), "line 2, moe_intermediate_size: must be a multiple of 8 but is 129"),
        (table("A,8,9,64,128"), "line 2, top_k: must be a whole number from 1 to 8 but is '9'"),
        (table("A,1,1,64,128"), "line 2, num_experts: must be a whole number from 2 to 65536"),
        (table("A,8,0,64,128"), "line 2, top_k: must be a whole number from 1 to 8 but is '0'"),
        (table(f"A,{10**30},2,64,128"), "line 2, num_experts: .* but is '1000"),
        (table(f"A,8,2,{'9' * 5000},128"), r"line 2, hidden_size: .* but is '9+ \.\.\. 9+'$"),
        (table("A,8,2,-64,128"), "line 2, hidden_size: .*'-64'"),
        (table("A,8,2,\u0666\u0664,128"), "line 2, hidden_size: .*'\u0666\u0664'"),  # 64, in Arabic digits
        (table("A,8,2,64.0,128"), "line 2, hidden_size: .*'64.0'"),
        (table("A" * 140_000 + ",8,2,64,128"), "line 2: not CSV: field larger than field limit"),
        (table('"A,8,2,64,128'), "line 2: not CSV: unexpected end of data"),
        (table("A\0,8,2,64,128"), "line 2: must be text in UTF-8 but has a NUL byte"),
    ],
)
def test_a_wrong_table_of_models_is_refused_by_line_column_and_value(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(DatasetError, match=f"mine.csv.*{named}") as refused:
        load_models(path)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (table(GOOD).encode("utf-16"), "line 1: must be text in UTF-8: save it as `CSV UTF-8`"),
        (table(GOOD, "\u00e9,8,2,64,128").encode("latin-1"), "line 3: must be text in UTF-8"),
        (b"A" * (300 << 10), "larger than any table of models (256 KiB)"),
    ],
)
def test_what_is_no_text_of_a_table_is_refused(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=f"mine.csv.*{re.escape(named)}"):
        load_models(path)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        DatasetError, match=re.escape(f"{tmp_path}/config.json: cannot be read as a model's config: No such")
    ):
        load_models(tmp_path)
    with pytest.raises(DatasetError, match=r"none\.csv: cannot be read as a CSV file: No such file"):
        load_models(tmp_path / "none.csv")
