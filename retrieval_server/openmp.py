"""How the threads of torch and FAISS wait for each other. To be set before either is imported."""

from __future__ import annotations

import os

VARIABLE = "OMP_WAIT_POLICY"


def wait_without_spinning() -> None:
    """Let threads that wait for others sleep; whoever has set the variable keeps it.

    The default is to spin. On a machine that is busy with something else, training above all, the thread that the
    others wait for is not running, and they spend the processor time that it needs: with two threads on two busy
    cores a query took 90 ms of processor time in place of 5.
    """
    os.environ.setdefault(VARIABLE, "PASSIVE")
