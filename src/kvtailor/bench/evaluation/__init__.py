"""`kvtailor.evaluate`: the bench in one call, with the words of its command line."""
