"""What `kvtailor calibrate` measures, one kind in one file, and the run that writes the file with its provenance."""
