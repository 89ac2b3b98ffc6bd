"""How a model is run fast. Each engine proves itself against the plain way when a model is loaded."""
