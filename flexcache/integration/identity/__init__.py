"""Identity of a model: digests of the files that an engine loads, and of its settings."""
