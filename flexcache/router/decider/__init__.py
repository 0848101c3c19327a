"""The process that decides: it knows the workers, their caches and their load."""
