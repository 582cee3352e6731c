"""How every planner's script is asked and answers: runs on stdin, ``{id: figure}`` on stdout.

It runs in the planner's own environment, so it imports nothing but the standard library.
"""

import json
import sys


def answer_all(figure):
    """Answer every run with ``figure(run)``; a run that raises has the error as its reason."""
    figures = {}
    for run in json.load(sys.stdin):
        try:
            figures[run["id"]] = figure(run)
        except Exception as error:
            figures[run["id"]] = {"reason": f"{type(error).__name__}: {str(error)[:160]}"}
    json.dump(figures, sys.stdout)
