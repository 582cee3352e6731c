"""``workbench chat``: what a run's model answers, beside the model that it began with."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .arguments import ProgressLine


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    parser = verbs.add_parser("chat", help="ask the base and the tuned model of a run", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN", help="folder of a run")
    parser.add_argument("prompts", metavar="PROMPT", nargs="+", help="what to ask; each is asked by itself")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="longest answer; default: 128")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print each prompt with both answers."""
    from ..pipeline.chat import SIDES, Chat

    progress = ProgressLine(options)
    with Chat(options.run_dir, progress=progress) as chat:
        progress.clear()
        answers = [
            {
                "prompt": prompt,
                **{side: chat.ask(prompt, side, max_new_tokens=options.max_new_tokens) for side in SIDES},
            }
            for prompt in options.prompts
        ]
    if options.json:
        print(json.dumps(answers))
        return 0
    for one in answers:
        print(f"> {one['prompt']}")
        for side in SIDES:
            print(f"[{side}]\n{one[side]}\n")
    return 0
