"""What several codecs have in common: settings and how they are checked, and the projection of joined heads."""
