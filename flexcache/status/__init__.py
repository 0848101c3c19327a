"""What `flexcache status` shows.

rates   what happened between two readings of a server's counters; pure
view    a reading, and the rates, as tables that fit a width; pure
watch   reads a server repeatedly, also one that restarts
"""
