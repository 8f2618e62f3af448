"""Cactus inside other engines. Each module imports its engine only when used."""
