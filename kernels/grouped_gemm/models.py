"""The table of real MoE models whose layers are measured (models.csv)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ...datasets import DatasetError, ForetuneError
from ...datasets.console.numbers_from_text import whole_number
from ...datasets.errors import abridged

COLUMNS = ("model", "num_experts", "top_k", "hidden_size", "moe_intermediate_size")
#: Far beyond any model: a few hundred experts, layers of a few ten thousand.
MOST_EXPERTS, MOST_WIDTH, MOST_NAME = 65536, 1 << 20, 200
#: TMA moves rows of multiples of 16 bytes: 8 elements of 16 bits.
WIDTH_STEP = 8
#: A table of all models there are takes some kilobytes; reading stops here.
_MOST_BYTES = 256 << 10


@dataclass(frozen=True)
class Model:
    """The MoE dimensions of one published model."""

    model: str
    num_experts: int
    top_k: int
    hidden_size: int
    moe_intermediate_size: int

    def projections(self) -> dict[str, tuple[int, int]]:
        """(N, K) of both grouped GEMMs of a layer: w13 (gate and up fused) and w2 (down)."""
        hidden, inter = self.hidden_size, self.moe_intermediate_size
        return {"w13": (2 * inter, hidden), "w2": (hidden, inter)}


def load_models(path: Path | str | None = None) -> tuple[Model, ...]:
    """The models of a CSV file; of the shipped table where no path is given. Empty lines are passed over.

    Raises `DatasetError` naming the file, line, column and value that is wrong, and what would be right.

    >>> load_models()[0].projections()["w13"]
    (28672, 4096)
    """
    file = Path(str(resources.files(__package__))) / "models.csv" if path is None else Path(path)
    models: dict[str, tuple[int, Model]] = {}
    for line, fields in _rows(file):
        where = f"{file}, line {line}"
        model = _model(fields, where)
        earlier, _ = models.setdefault(model.model, (line, model))
        if earlier != line:
            raise DatasetError(f"{where}, model: {model.model!r} stands in line {earlier} already: give each one row")
    if not models:
        raise DatasetError(f"{file}: no models in it: a row for each is due below the columns' names")
    return tuple(model for _, model in models.values())


def _rows(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, fields by column) of each row."""
    reader = csv.reader(io.StringIO(_text(file), newline=""), strict=True)
    names: list[str] | None = None
    try:
        for fields in reader:
            where = f"{file}, line {reader.line_num}"
            if not fields:
                continue
            if names is None:
                names = _columns([name.strip() for name in fields], where)
            elif len(fields) != len(names):
                raise DatasetError(f"{where}: must have {len(names)} fields as the first line has, but {len(fields)}")
            else:
                yield reader.line_num, dict(zip(names, fields, strict=True))
    except csv.Error as error:  # a field of over 131,072 characters, or a quote that nothing ends
        raise DatasetError(f"{file}, line {reader.line_num}: not CSV: {error}") from None
    if names is None:
        _columns([], str(file))


def _text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
    except OSError as error:
        raise DatasetError(f"{file}: cannot be read as a CSV file: {error.strerror}") from None
    if len(content) > _MOST_BYTES:
        raise DatasetError(f"{file}: larger than any table of models ({_MOST_BYTES >> 10} KiB)")
    try:
        text = content.decode("utf-8-sig")  # Excel begins with a byte order mark
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DatasetError(f"{file}, line {line}: must be text in UTF-8: save it as `CSV UTF-8`") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise DatasetError(f"{file}, line {line}: must be text in UTF-8 but has a NUL byte")
    return text


def _columns(names: list[str], where: str) -> list[str]:
    missing = [column for column in COLUMNS if column not in names]
    others = [name for name in names if name not in COLUMNS]
    repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    for wrong, columns in (("missing", missing), ("unknown", others), ("there twice", repeated)):
        if columns:
            raise DatasetError(
                f"{where}: columns {wrong}: {abridged(', '.join(columns))}; the first line must be {','.join(COLUMNS)}"
            )
    return names


def _model(fields: dict[str, str], where: str) -> Model:
    name = fields["model"].strip()
    # Evaluation holds out all models of a family at once, which it knows by the name's first word.
    if not (name[:1].isascii() and name[:1].isalpha() and name.isprintable() and len(name) <= MOST_NAME):
        raise DatasetError(
            f"{where}, model: must be a name that begins with a letter, A to Z, in at most {MOST_NAME} characters, "
            f"but is {abridged(name, 60)!r}"
        )
    # A layer of one expert is no grouped GEMM.
    experts = _count(fields, "num_experts", where, 2, MOST_EXPERTS)
    top_k = _count(fields, "top_k", where, 1, experts)
    return Model(name, experts, top_k, _width(fields, "hidden_size", where), _width(fields, COLUMNS[-1], where))


def _count(fields: dict[str, str], column: str, where: str, low: int, high: int) -> int:
    try:
        return whole_number(fields[column].strip(), low, high)
    except ForetuneError as error:
        raise DatasetError(f"{where}, {column}: {error}") from None


def _width(fields: dict[str, str], column: str, where: str) -> int:
    width = _count(fields, column, where, WIDTH_STEP, MOST_WIDTH)
    if width % WIDTH_STEP:
        raise DatasetError(f"{where}, {column}: must be a multiple of {WIDTH_STEP} but is {width}")
    return width
