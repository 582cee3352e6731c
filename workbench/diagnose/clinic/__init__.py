"""The clinic: small real faults that a notebook can switch on, each of which the doctors must name.

::

    from workbench import clinic

    clinic.names()                                   # which faults there are
    with clinic.switch_on("leak.graph_total", model, optimizer):
        ...                                          # any loop over this model; watch() finds it

A fault is hooks on the given model and changes to it and its optimizer; leaving the block takes all of it back.
"""

from .faults import Fault, names, switch_on

__all__ = ["Fault", "names", "switch_on"]
