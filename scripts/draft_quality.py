"""α of SpS for the embedded draft at 4, 5 and 6 bits on each kind of kernels: remakes cactus/draft_quality.json.

α = mean of Σ min(p, q) over positions of texts that the verifier wrote, at the default sampling. Where int8 kernels run, those that
take seven bits of x only are measured too: their arithmetic is the same whole numbers on any machine.

    python scripts/draft_quality.py
"""

import json
import sys
from datetime import date
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from cactus import embedded, engine, pairs
from cactus.decoding import run
from cactus.recordings import RECORDINGS
from cactus.rules import SpS
from cactus.sampling import warp
from cactus.trace import Settings

MORE_PROMPTS = [
    "Explain how a bicycle stays upright.",
    "Write a short poem about rain on a tin roof.",
    "Name three rivers in Europe and say where they end.",
    "Give me advice for a first job interview.",
    "What would a day on the moon be like?",
]


def main() -> None:
    module = AutoModelForCausalLM.from_pretrained(embedded.fetch(), dtype=torch.float32)
    pair, texts = pairs.load_embedded(5), []
    for number, prompt in enumerate(tqdm([recording.prompt for recording in RECORDINGS] + MORE_PROMPTS, "texts")):
        trace, rounds = run(pair, prompt, SpS(), Settings(num_draft_tokens=0, max_new_tokens=80, prompt_id=number))
        for _ in rounds:
            pass
        texts.append((torch.tensor((trace.prompt_ids + trace.ids)[:-1]), len(trace.ids)))
    laws = [warp(pair.verifier.open().forward(ids, count), Settings().sampling) for ids, count in texts]
    kinds = [("float32", engine.Float32, 0)]
    if engine.int8_runs():
        kinds += [("int8", engine.Int8, 127)] if engine.Int8.levels == 127 else []
        kinds += [("int8 on 7 bits", engine.Int8, 63)]
    path = Path(pairs.__file__).with_name("draft_quality.json")
    table = json.loads(path.read_text())["alpha"] if path.exists() else {}
    for name, matrix, levels in kinds:
        table[name] = {}
        for bits in pairs.EMBEDDED_BITS:
            engine.Int8.levels = levels or engine.Int8.levels
            draft = engine.PackedModel(module, pair.verifier.vocab_size, matrix, partial(embedded.round_to_bits, bits=bits))
            overlaps = [
                torch.minimum(warp(draft.open().forward(ids, count), Settings().sampling), q).sum(-1)
                for (ids, count), q in zip(texts, laws, strict=True)
            ]
            alpha = torch.cat(overlaps)
            table[name][str(bits)] = round(alpha.mean().item(), 3)
            print(
                f"{name}, {bits} bits: α {alpha.mean():.3f} ± {alpha.std() / len(alpha) ** 0.5:.3f} over {len(alpha)} positions",
                flush=True,
            )
    about = {"positions": len(alpha), "device": pair.provenance["device"], "versions": pair.provenance["versions"]}
    path.write_text(json.dumps({"alpha": table, "date": date.today().isoformat(), **about}, indent=2) + "\n")


if __name__ == "__main__":
    main()
