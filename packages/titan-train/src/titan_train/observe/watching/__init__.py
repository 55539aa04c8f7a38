"""Look at a run while it goes on, from its folder alone.

`follow` reads what is appended to `metrics.jsonl`; `goodput` says which share of the time made progress and what took the
rest; `view` draws both in a terminal.
"""

from titan_train.observe.watching.follow import Follower
from titan_train.observe.watching.goodput import Goodput, find_goodput
from titan_train.observe.watching.view import event_line, goodput_line, panel

__all__ = ["Follower", "Goodput", "event_line", "find_goodput", "goodput_line", "panel"]
