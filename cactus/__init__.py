"""Cactus: speculative decoding with constrained acceptance (Hao and Mou, ICLR 2026), exact and visible.

Importing the package loads neither gradio nor transformers: an engine that only needs the rule pays for torch alone.
"""

__version__ = "0.1.0"
