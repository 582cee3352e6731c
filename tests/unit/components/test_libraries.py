"""Two threads that import the large libraries at once: the second waits, and both get whole modules."""

import subprocess
import sys

SCRIPT = """
import sys, threading
from workbench.components.libraries import load_libraries

failed = []

def part(name):
    load_libraries()
    try:
        import transformers
        from transformers.modeling_utils import PreTrainedModel
        from accelerate import dispatch_model
    except BaseException as error:
        failed.append(f"{name}: {error}")

sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=part, args=(name,)) for name in ("estimate", "run", "preview")]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(failed or "whole")
"""


def test_threads_that_begin_at_once_get_whole_libraries() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip().splitlines()[-1] == "whole", done.stdout + done.stderr
