"""Cactus inside engines that people already run."""
