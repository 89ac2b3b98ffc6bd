"""Fast ways to run a model. Each engine is compared with the plain way when a model is loaded."""
