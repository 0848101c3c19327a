"""Reader of the traces that `flexcache.tracing` writes, which shows and replays them.

traces     the records of a trace: FlexCache's own, or requests in Mooncake's format
history    the records of each task; one request's story, totals, Chrome's trace events
replay     repeats the calls of a trace on a cache of any configuration
"""
