"""Probability-integral transform of a trace: where each emitted token falls in the law the theory gives it, spread uniformly over its
own mass. If the decoder is right, these numbers are independent and uniform, whatever the models say."""

import random

import torch

from cactus.rules import SpS


def transforms(trace, seed=0, law=None):
    """One number in [0, 1) per emitted token of a trace with complete rows: its law is h_alg at judged positions, q at bonus ones."""
    spread = random.Random(seed)
    law = law or trace.rule
    out = []
    for round in trace.rounds:
        for token in round.emitted:
            judged = next((drafted for drafted in round.drafted if drafted.index == token.index and drafted.judged), None)
            row = judged.row if judged else token.row
            q = torch.tensor(row.q, dtype=torch.float64)
            h = (law if judged else SpS()).effective(torch.tensor(row.p, dtype=torch.float64) if judged else q, q)
            order = sorted(range(len(row.ids)), key=row.ids.__getitem__)  # any fixed order that is not that of p/q
            place = order.index(row.at(token.id))
            mass = [h[i].item() for i in order]
            out.append((sum(mass[:place]) + spread.random() * mass[place]) / sum(mass))
    return out
