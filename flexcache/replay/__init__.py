"""Reads the traces that `flexcache.tracing` writes, shows them, and replays them.

reader     a trace's records: `RecordedTrace`; `keys` completes those of prompts
mooncake   the same for request traces in Mooncake's format
history    the records of each task, collected
story      what happened to one request, as text
chrome     tasks and ops for chrome://tracing and Perfetto
overlap    how long ops of two kinds ran at the same time
summary    hits, bytes moved, latencies
replay     repeats the calls of a trace on a cache of any configuration: with `settings` and a
           `player`, and a `report` of what differed
"""
