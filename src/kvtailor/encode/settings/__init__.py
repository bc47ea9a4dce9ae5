"""Settings that several codecs have, what follows of them, and how they are checked."""
