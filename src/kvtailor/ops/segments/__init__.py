"""What codecs share of their segments, and what is done with any segment: packing, weighing tokens, checking a file."""
