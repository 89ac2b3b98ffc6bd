"""Models by name: starters, which come with the package, and pretrained ones; sizes, and guesses of a round's time."""
