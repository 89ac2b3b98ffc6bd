"""One peer from its recipe: assembled, trained, evaluated, saved, exported; the turns of peers on one machine."""
