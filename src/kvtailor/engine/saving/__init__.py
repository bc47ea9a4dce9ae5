"""One layer as a saved cache has it, and back; also where its heads lie on other processes by then."""
