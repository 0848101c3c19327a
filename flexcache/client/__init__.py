"""The engine's side: its scheduler's and its ranks' connections to a cache."""
