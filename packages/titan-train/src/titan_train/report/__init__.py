"""The report of a run, and the comparison of several: one self-contained HTML file, and a few lines for the terminal.

Both are made from the files of the run's folder alone, so they work for a run that is going on, that crashed, or that
was made on another machine.
"""

from titan_train.report.compare import compare_runs
from titan_train.report.page import build_report
from titan_train.report.summary import summarize

__all__ = ["build_report", "compare_runs", "summarize"]
