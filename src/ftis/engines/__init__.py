"""Models: loaded, run fast, optimized. Each fast engine is compared with the plain way when a model is loaded."""
