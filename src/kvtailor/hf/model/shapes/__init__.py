"""What each layer of a model keeps, from its configuration."""
