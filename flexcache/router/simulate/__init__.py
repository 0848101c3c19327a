"""Simulation of engines behind the router, to compare policies on a trace in seconds."""
