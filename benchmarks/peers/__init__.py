"""Other programs that run the same model, for a comparison: their file formats and how they are called."""
