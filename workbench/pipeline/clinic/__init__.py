"""The clinic: a small real fault for every cause the doctors know, to be switched on in a notebook.

::

    from workbench import clinic

    clinic.names()                                   # the causes that have a fault here
    clinic.run("leak.graph_total")                   # a run with this fault, and what the doctors say of it
    clinic.run("leak.graph_total", healthy=True)     # its healthy twin: they say nothing of the kind
    print(clinic.source_of("leak.graph_total"))      # the code of both
    clinic.elsewhere()                               # the causes that need what not every machine has

    with clinic.switch_on("leak.graph_total", model, optimizer):
        ...                                          # the same in a loop of your own; watch() finds it

The code of a fault is plain user code around ``watch``, ``check`` and ``release``. Each run makes what it needs and
leaves nothing behind; most take a few tenths of a second on one CPU core.
"""

from .library import ClinicRun, elsewhere, names, run, source_of
from .switches import Fault, switch_on, switches

__all__ = ["ClinicRun", "Fault", "elsewhere", "names", "run", "source_of", "switch_on", "switches"]
