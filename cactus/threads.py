"""How long OpenMP's idle threads spin. To be settled before torch is imported."""

import os

SPINS = "2000"


def settle() -> None:
    """Let idle OpenMP threads spin briefly, unless the user chose otherwise.

    By default they spin for so long that a model on two cores beside any other busy process (a web server, say) is slowed down
    20 times and more, since spinning threads hold the core that the working one waits for.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
