"""Models by name: starters that come with the package, and pretrained ones; and their sizes."""
