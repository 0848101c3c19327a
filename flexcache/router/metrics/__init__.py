"""Metrics of a router.

readers    take values from the statistics
routing    decisions, and workers
feed       index, and sources of events
requests   requests, and processes
catalog    all of them
"""
