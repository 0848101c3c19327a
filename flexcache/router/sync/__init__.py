"""Several routers before the same engines: each follows the requests of the others."""
