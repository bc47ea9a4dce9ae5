"""Where records go besides the folder of a run: trackers of experiments, each only where it is asked for."""
