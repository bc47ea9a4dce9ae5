"""All that needs a GPU, in pieces of at most ten minutes that resume: `make gpu-day`; docs/gpu-day.md explains it."""
