"""The spin count of OpenMP: set unless the user chose, and only there."""

import os

from cactus import threads


def test_the_users_choice_wins(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    threads.settle()
    assert os.environ["GOMP_SPINCOUNT"] == threads.SPINS
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    threads.settle()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    threads.settle()
    assert "GOMP_SPINCOUNT" not in os.environ
