"""Endpoint picker for Envoy and the Gateway API Inference Extension: leaves the choice of the
engine to a `Chooser`. Needs the extra ``gateway``."""
