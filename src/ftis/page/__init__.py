"""Pages about runs, experiments and swarms: the static report, the page that is watched, their figures and tables."""
