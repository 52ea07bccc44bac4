from .campaign import collect_on_gpus as collect_on_gpus, collect_replayed as collect_replayed
from .recording import Recording as Recording
from .runner import ReplayRunner as ReplayRunner
from .summary import Summary as Summary
