"""Read the sizes of models from a table (CSV), or from a Hugging Face config.json, whose field names vary."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..datasets import DatasetError, ForetuneError
from ..datasets.console import whole_number
from ..datasets.errors import abridged
from ..datasets.files import read_regular

#: The longest name of a model; and the largest table that is read, of which all models take a few kilobytes.
MOST_NAME, _MOST_TABLE_BYTES = 200, 256 << 10


def table_rows(
    file: Path, columns: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (location, fields by column) of each row of a CSV file of models.

    Empty lines are skipped.

    Args:
        file: The file.
        columns: The required columns; the first one is the model's name.
        optional: Columns that may be missing; their fields are then empty.

    Raises:
        DatasetError: A value, a column or the file is not valid, a model has two rows, or there are no rows. The
            message names file, line, column, the bad value and valid values.
    """
    lines: dict[str, int] = {}
    for line, fields in _rows(file, columns, optional):
        where = f"{file}, line {line}"
        name = name_of_model(fields[columns[0]], f"{where}, {columns[0]}")
        if (earlier := lines.setdefault(name, line)) != line:
            raise DatasetError(
                f"{where}, {columns[0]}: {name!r} is already in line {earlier}: each model must have one row"
            )
        yield where, {**dict.fromkeys(optional, ""), **fields, columns[0]: name}
    if not lines:
        raise DatasetError(f"{file}: has no models: there must be a row for each below the column names")


def count_in(fields: Mapping[str, str], column: str, where: str, low: int, high: int, step: int = 1) -> int:
    """Return the integer in a row's column, between `low` and `high` and a multiple of `step`.

    Raises:
        DatasetError: It is not such a number; the message starts with `where`.
    """
    try:
        count = whole_number(fields[column].strip(), low, high)
    except ForetuneError as error:
        raise DatasetError(f"{where}, {column}: {error}") from None
    if count % step:
        raise DatasetError(f"{where}, {column}: must be a multiple of {step} but is {count}")
    return count


def name_of_model(name: str, where: str) -> str:
    """Return a model's name without spaces around it.

    Raises:
        DatasetError: It is not a valid name; the message starts with `where`.
    """
    name = name.strip()
    # Evaluation holds out all models of a family, which the name's first word identifies.
    if not (name[:1].isascii() and name[:1].isalpha() and name.isprintable() and len(name) <= MOST_NAME):
        raise DatasetError(
            f"{where}: must be a name that begins with a letter, A to Z, in at most {MOST_NAME} characters, "
            f"but is {abridged(name, 60)!r}"
        )
    return name


def _rows(file: Path, columns: Sequence[str], optional: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (line number, fields by column) of each row."""
    reader = csv.reader(io.StringIO(_text(file), newline=""), strict=True)
    names: list[str] | None = None
    try:
        for fields in reader:
            where = f"{file}, line {reader.line_num}"
            if not fields:
                continue
            if names is None:
                names = _columns([name.strip() for name in fields], columns, optional, where)
            elif len(fields) != len(names):
                raise DatasetError(f"{where}: must have {len(names)} fields as the first line has, but {len(fields)}")
            else:
                yield reader.line_num, dict(zip(names, fields, strict=True))
    except csv.Error as error:  # a field of over 131,072 characters, or an unclosed quote
        raise DatasetError(f"{file}, line {reader.line_num}: not CSV: {error}") from None
    if names is None:
        _columns([], columns, optional, str(file))


def _text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(_MOST_TABLE_BYTES + 1)
    except OSError as error:
        raise DatasetError(f"{file}: cannot be read as a CSV file: {error.strerror}") from None
    if len(content) > _MOST_TABLE_BYTES:
        raise DatasetError(f"{file}: larger than any table of models ({_MOST_TABLE_BYTES >> 10} KiB)")
    try:
        text = content.decode("utf-8-sig")  # Excel writes a byte order mark
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DatasetError(f"{file}, line {line}: must be text in UTF-8: save it as `CSV UTF-8`") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise DatasetError(f"{file}, line {line}: must be text in UTF-8 but has a NUL byte")
    return text


def _columns(names: list[str], columns: Sequence[str], optional: Sequence[str], where: str) -> list[str]:
    missing = [column for column in columns if column not in names]
    others = [name for name in names if name not in (*columns, *optional)]
    repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    for wrong, found in (("missing", missing), ("unknown", others), ("there twice", repeated)):
        if found:
            due = ",".join(columns) + (f", and may have {' and '.join(optional)}" if optional else "")
            raise DatasetError(f"{where}: columns {wrong}: {abridged(', '.join(found))}; the first line must be {due}")
    return names


#: What architectures call a size, the most specific name first.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
    "experts_per_token",
)
INTERMEDIATE = (
    "moe_intermediate_size",
    "expert_ffn_hidden_size",
    "moe_ffn_hidden_size",
    "intermediate_size",
    "ffn_hidden_size",
)
HIDDEN = ("hidden_size", "d_model")
#: The input and output width of experts that do not work in the hidden size.
LATENT = ("moe_latent_size", "routed_expert_hidden_size")
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
SHARED_WIDTH = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
    "share_expert_dim",
)
ACTIVATION = ("mlp_hidden_act", "hidden_act", "hidden_activation")
#: Experts with these activations have no gate.
_UNGATED = ("relu2", "relu_squared")
#: Fields that are false if the experts are switched off.
_SWITCHES = ("is_moe", "enable_moe_block")
#: Architectures whose experts are rows of an embedding.
_OTHER_EXPERTS = ("doge",)
#: Nested configs to read first: the language model's.
_FIRST = ("text_config", "language_config", "llm_config", "thinker_config")
_EXPERTS_IN_A_NAME = re.compile(r"expert|moe(?![a-z])", re.IGNORECASE)
#: The largest config that is read; those with many labels have a few megabytes.
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class MoeConfig:
    """The sizes of a model's experts, as text by column of a table of models, and a line that tells what was read."""

    file: Path
    fields: Mapping[str, str]
    line: str


def is_config(path: Path | str) -> bool:
    """Return whether a path is that of a config.json: a file whose name ends so, or a folder."""
    return Path(path).suffix == ".json" or os.path.isdir(path)


def read_moe_config(path: Path | str) -> MoeConfig:
    """Return the MoE sizes in a config.json.

    A multimodal model's language model is read: the nested configs are searched, `text_config` first. Shared experts
    are dense layers, so they are not counted.

    Args:
        path: The file, or a folder that holds a file named config.json.

    Raises:
        DatasetError: The file cannot be read, or has no experts or not all of their sizes. The message names the fields
            that were looked for.
    """
    file = Path(path, "config.json") if os.path.isdir(path) else Path(path)
    config = _parsed(file)
    found = next((one for one in _nested(config) if (_first(one[1], EXPERTS, file) or ("", 0))[1] > 1), None)
    if found is None or any(found[1].get(switch) is False for switch in _SWITCHES):
        raise _no_experts(file, config)
    place, sizes = found
    where = f"{file}{f', {place}' * bool(place)}"
    if sizes.get("model_type") in _OTHER_EXPERTS:
        raise DatasetError(f"{where}: the experts of {sizes['model_type']} are not matrices of a grouped GEMM")
    for synonyms in (EXPERTS, TOP_K):
        _check_agree(sizes, synonyms, where)
    read: dict[str, tuple[str, Any]] = {}
    missing = []
    for column, what, names in (
        ("num_experts", "the number of experts", EXPERTS),
        ("top_k", "the number of experts per token", TOP_K),
        ("hidden_size", "the hidden size", HIDDEN),
        ("moe_intermediate_size", "the intermediate size of an expert", INTERMEDIATE),
    ):
        if (one := _first(sizes, names, where)) is None:
            missing.append(f"{what} (looked for {', '.join(names)})")
        else:
            read[column] = one
    if missing:
        known = ", ".join(f"{name}={value}" for name, value in read.values())
        raise DatasetError(f"{where}: has {known}, but not {' nor '.join(missing)}: use a CSV file of models")
    if latent := _first(sizes, LATENT, where):
        read["expert_hidden_size"] = latent
    activation = next((sizes[name] for name in ACTIVATION if isinstance(sizes.get(name), str)), None)
    gated = activation not in _UNGATED
    fields = {column: str(value) for column, (_, value) in read.items()}
    fields |= {"model": _name(file, config), "gated": "yes" if gated else "no"}
    fields.setdefault("expert_hidden_size", "")
    said = [f"{name}={value}" for name, value in read.values()]
    said.append(f"{'gated' if gated else 'not gated'} ({activation or 'no activation is named'})")
    if shared := _shared(sizes, where):
        said.append(f"without {shared}")
    return MoeConfig(file, fields, f"{where}: {fields['model']}: {', '.join(said)}")


def _parsed(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    try:
        config = json.loads(read_regular(file, _MOST_BYTES, follow=True))
    except OSError as error:
        raise DatasetError(f"{file}: cannot be read as a model's config: {error.strerror}") from None
    except ForetuneError as error:
        raise DatasetError(f"{file}: cannot be read as a model's config: {error}") from None
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{file}: not JSON: {abridged(str(error))}") from None
    if not isinstance(config, dict):
        raise DatasetError(f"{file}: must be a JSON object, the config of a model")
    return config


def _nested(config: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, fields) of a config and of those nested in it; a nested config inherits fields that it does not set.

    >>> [place for place, _ in _nested({"vision_config": {}, "text_config": {"hidden_size": 8}})]
    ['', 'text_config', 'vision_config']
    """
    own = {name: value for name, value in config.items() if not isinstance(value, dict)}
    yield place, own
    inner = [name for name, value in config.items() if name.endswith("_config") and isinstance(value, dict)]
    for name in sorted(inner, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST)):
        set_there = {field: value for field, value in config[name].items() if value is not None}
        yield from _nested(own | set_there, f"{place}.{name}".removeprefix("."))


def _first(sizes: Mapping[str, Any], names: Sequence[str], where: object) -> tuple[str, int] | None:
    """Return the first of the fields `names` that is set, and its value (the first of a list); None without one.

    Raises `DatasetError`, whose message begins with `where`, for a value that is no integer.
    """
    for name in names:
        value = sizes.get(name)
        if isinstance(value, list) and value:
            value = value[0]
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise DatasetError(f"{where}, {name}: must be an integer but is {abridged(repr(value), 60)}")
        if value:
            return name, value
    return None


def _check_agree(sizes: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    """Raise `DatasetError`, naming the place `where`, if several of the fields `names` have different values."""
    found = [one for name in names if (one := _first(sizes, [name], where))]
    if len({value for _, value in found}) > 1:
        raise DatasetError(f"{where}: {' but '.join(f'{name}={value}' for name, value in found)}")


def _no_experts(file: Path, config: Mapping[str, Any]) -> DatasetError:
    """Return the error for a model's config in `file` that has no experts, or only one."""
    fields = [(name, value) for _, sizes in _nested(config) for name, value in sizes.items()]
    if off := [name for name, value in fields if name in _SWITCHES and value is False]:
        return DatasetError(f"{file}: has no experts, because {off[0]} is false")
    similar = dict.fromkeys(name for name, value in fields if value and _EXPERTS_IN_A_NAME.search(name))
    known = f". Set are {abridged(', '.join(similar))}" if similar else ""
    return DatasetError(
        f"{file}: a dense model, or its experts have an unknown name: looked for at least 2 in {', '.join(EXPERTS)}, "
        f"in the config and those nested in it{known}"
    )


def _shared(sizes: Mapping[str, Any], where: str) -> str:
    """Return the fields on shared experts in a config as text, such as "n_shared_experts=1"; "" without any."""
    count, width = _first(sizes, SHARED, where), _first(sizes, SHARED_WIDTH, where)
    return " and ".join(f"{name}={value}" for name, value in filter(None, (count, width)))


def _name(file: Path, config: Mapping[str, Any]) -> str:
    """Return a name for the model: that of the repository or folder, or else the architecture's."""
    folder = file.resolve().parent
    if folder.parent.name == "snapshots":  # a download of huggingface_hub: models--OWNER--NAME/snapshots/COMMIT
        folder = Path(folder.parents[1].name.rpartition("--")[2])
    names = (folder.name if file.name == "config.json" else file.stem, config.get("model_type"))
    return next((str(name) for name in names if name and str(name)[0].isascii() and str(name)[0].isalpha()), "Model")
