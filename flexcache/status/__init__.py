"""What `flexcache status` shows.

rates     what happened between two looks at a server's counters; pure
view      a look, and the rates, as tables that fit a width; pure
watch     looks again and again, also at a server that goes and comes back
command   the command itself
"""
