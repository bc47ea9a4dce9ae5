"""Vision-language models with images in the prompt."""
