"""Tasks: the life of gets, puts and prefetches, from match to answer."""
