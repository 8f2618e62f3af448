"""Writes what the server test serves, and prints the two folders: the embedded verifier, and its 5-bit draft as a plain Llama model.

Runs in the project's own environment: making the verifier needs a newer transformers than vLLM allows.
"""

import shutil
from pathlib import Path

from transformers import LlamaForCausalLM

from cactus import embedded

BITS = 5


def draft_folder(verifier: Path) -> Path:
    """The draft's folder beside the verifier's, written by the first call."""
    folder = verifier.with_name(f"{verifier.name}-{BITS}-bits")
    if not folder.exists():
        attempt = folder.with_name(f"{folder.name}.unfinished")
        embedded.draft_from(LlamaForCausalLM.from_pretrained(verifier), BITS).save_pretrained(attempt)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(verifier / name, attempt)
        attempt.rename(folder)
    return folder


if __name__ == "__main__":
    verifier = embedded.fetch()
    print(verifier, draft_folder(verifier), sep="\n")
