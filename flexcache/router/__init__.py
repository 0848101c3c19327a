"""Routes requests to the engine that will answer them soonest. See docs/router.md."""
