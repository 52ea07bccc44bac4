"""What another machine knows of a kernel, added to what is known here."""

from __future__ import annotations

import json

from ....datasets import DeviceSpec
from .choice_document import joined_launches, new_document
from .shared_file import MOST_BYTES, Document, size_of


def merge_choices(here: Document, there: Document, kept: list[int]) -> None:
    """Add what is there to what is here: as the oldest, so that it is the first to be forgotten, and as far as there is
    room, the newest first. `kept` gets the places of the entries that are here then."""
    if not here:
        here |= new_document(there["kernel"], DeviceSpec.from_json(there["device"]))
    places = {_text(config): at for at, config in enumerate(here["configs"])}
    texts = [_text(config) for config in there["configs"]]
    known = {_identity(entry): entry for entry in here["entries"]}
    new: list[Document] = []
    kept.clear()  # an update may be tried twice
    room = MOST_BYTES - size_of(here)
    for number in reversed(range(len(there["entries"]))):
        entry = there["entries"][number]
        named = dict.fromkeys([*map(int, entry["times"]), *entry["chosen"].values()])
        fresh = list(dict.fromkeys(texts[at] for at in named if texts[at] not in places))
        places_then = {text: len(here["configs"]) + more for more, text in enumerate(fresh)}
        moved = {at: places_then[texts[at]] if texts[at] in places_then else places[texts[at]] for at in named}
        times = {str(moved[int(at)]): time_us for at, time_us in entry["times"].items()}
        chosen = {bundle: moved[at] for bundle, at in entry["chosen"].items()}
        mine = known.get(_identity(entry))
        joined = entry | {"times": times, "chosen": chosen}
        if mine is not None:
            joined = mine | {"times": times | mine["times"], "chosen": chosen | mine["chosen"]}
            joined["launches"] = joined_launches(entry["launches"], mine["launches"])
        size = size_of(joined) + 1 - (0 if mine is None else size_of(mine) + 1)
        size += sum(map(len, fresh))  # with spaces, and so a bit more than it takes
        if size > room:
            continue
        room -= size
        places |= places_then
        here["configs"] += map(json.loads, fresh)
        kept.append(number)
        if mine is None:
            new.append(joined)
        else:
            mine |= joined
    kept.reverse()
    here["entries"] = new[::-1] + here["entries"]


def _text(config: Document) -> str:
    return json.dumps(config, sort_keys=True)


def _identity(entry: Document) -> str:
    return json.dumps([entry["source"], entry["software"], entry["problem"]], sort_keys=True)
