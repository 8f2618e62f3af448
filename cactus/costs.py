"""What the passes of a pair cost, measured, and the block length that pays best at those costs."""

import math
import time
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from cactus.sampling import Sampling, draw, warp_kept

LONGEST = 16  # drafted tokens per block that are weighed
CONTEXT = 64  # tokens before the passes that are timed
REPEATS = 5
# What is taken for known before anything was judged: four of five tokens accepted.
PRIOR_ACCEPTED, PRIOR_JUDGED = 4, 5


@dataclass(frozen=True)
class Costs:
    """Seconds. draft: one draft step; verify: verifier passes over 1, 2, … tokens; both with warping, draft with its draw. Raises
    ValueError for what no clock measures."""

    draft: float
    verify: tuple[float, ...]

    def __post_init__(self):
        object.__setattr__(self, "verify", tuple(self.verify))  # JSON has lists
        if not all(0 < seconds < math.inf for seconds in (self.draft, *self.verify)):
            raise ValueError(f"What passes cost must be seconds above 0, got {self.draft} and {self.verify}.")

    def best_length(self, accepted: int, judged: int) -> int:
        """The m from 1 up that maximises expected tokens per second, (1 + α + … + αᵐ) / (m·draft + verify[m]), where α is estimated
        from the judged tokens of the run so far and how many of them were accepted.

        Judged tokens only, for the sake of the output's law: those not judged keep their draws for the next block, and a block
        length that knew them would not be independent of what it decides about. Source: the speed-up of Leviathan et al. 2023, eq. (1)
        over the cost of a block.
        """
        alpha = (accepted + PRIOR_ACCEPTED) / (judged + PRIOR_JUDGED)
        expected, power, best, most = 1.0, 1.0, 1, 0.0
        for m in range(1, len(self.verify)):
            power *= alpha
            expected += power
            speed = expected / (m * self.draft + self.verify[m])
            if speed > most:
                best, most = m, speed
        return best


@torch.inference_mode()
def measure(pair) -> Costs:
    """Time a pair's passes: medians of `REPEATS`, the lengths in turn; lengths between those timed are interpolated. A second for
    the embedded pair."""
    verifier, draft = pair.verifier.open(), pair.draft.open()
    device, ids = pair.device, torch.arange(CONTEXT, device=pair.device) % pair.verifier.vocab_size
    lengths = [1, 2, 4, 8, LONGEST + 1]
    seconds: dict[tuple[str, int], list[float]] = {}

    def timed(name: str, context, length: int) -> None:
        start = time.perf_counter()
        _, rows = warp_kept(context.forward(ids[:length], length), Sampling())
        if context is draft:
            draw(rows, torch.full((length,), 0.5, dtype=torch.float64, device=device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.setdefault((name, length), []).append(time.perf_counter() - start)
        context.crop(CONTEXT)

    try:
        for context in (verifier, draft):
            context.forward(ids, 1)
        for _ in range(REPEATS):
            timed("draft", draft, 1)
            for length in lengths:
                timed("verify", verifier, length)
    finally:
        verifier.close()
        draft.close()
    known = [median(seconds["verify", length]) for length in lengths]
    verify = np.interp(range(1, lengths[-1] + 1), lengths, known)
    return Costs(median(seconds["draft", 1]), tuple(verify.tolist()))
