"""All benchmarks, one after the other: ``python -m benchmarks`` (``make bench``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Run every module beside this one and return 1 when one failed."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"]).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all benchmarks met their bounds")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
