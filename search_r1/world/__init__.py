"""The embedded default: a seeded encyclopedia of invented things, conversations about it and demonstrations."""

from search_r1.world.files import DEFAULT_WORLD, WorldSettings, build_corpus, build_rows, write_world

__all__ = ["DEFAULT_WORLD", "WorldSettings", "build_corpus", "build_rows", "write_world"]
